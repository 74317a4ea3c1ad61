#include <dtensor/mesh/two_meshes.hpp>

#include "src/mesh/world_state.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>

#include <fmt/format.h>

namespace dtensor {

namespace {

World* maker_of(const DeviceMesh& mesh) { return static_cast<const detail::MeshState*>(mesh.id())->world; }

std::string name_of(World* world) {
  return world ? fmt::format("rank {} of {}", world->rank(), world->size()) : "a rank of a launch that has ended";
}

constexpr const char* kOwn =
    "each rank has its own mesh and tensors, and ranks that are threads of one process must not share any; hint: make the model, its "
    "optimizer and all tensors inside of the function that dt::launch runs, in variables of that function, so that every rank makes its "
    "own";

}  // namespace

std::string why_two(const DeviceMesh& first, const DeviceMesh& second) {
  auto *one = maker_of(first), *other = maker_of(second);
  if (one == other) return "hint: bring both to one mesh with full_tensor() and distribute_tensor()";
  return fmt::format("the first was made by {}, the second by {}: {}", name_of(one), name_of(other), kOwn);
}

void check_maker(std::string_view op, const DeviceMesh& mesh) {
  auto *maker = maker_of(mesh), *here = detail::existing_world();
  if (!here || maker == here || here->size() == 1) return;  // a thread of autograd's or the user's is a world of one, if any
  fail(op, "the operands are tensors of {}, and this is {}; got a tensor on {}: {}", name_of(maker), name_of(here), mesh.str(), kOwn);
}

}  // namespace dtensor
