#include "rng/check.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/tensor.hpp>

#include "src/comm/describe.hpp"
#include "src/dispatch/compared.hpp"
#include "src/dispatch/replicated.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>

namespace dtensor {

namespace {

GeneratorCheck check_by_default() {
  const char* value = std::getenv("DTENSOR_CHECK_GENERATORS");
  const std::string_view set = value ? value : "";
  if (set == "0" || set == "off") return GeneratorCheck::off;
  if (set == "1" || set == "always") return GeneratorCheck::always;
#ifndef NDEBUG
  if (set != "first") return GeneratorCheck::always;
#endif
  return GeneratorCheck::first;
}
thread_local GeneratorCheck current_check = check_by_default();

void compare(std::string_view op, const at::Generator& generator, const DeviceMesh& mesh) {
  comm::Subject subject(op);
  const auto differing = dispatch::ranks_that_differ(generator.get_state(), mesh);
  require(differing.empty(), op,
          "the generators of ranks {} and of rank {} have drifted apart: they were seeded differently, or have drawn different amounts; "
          "hint: torch::manual_seed with one seed on every rank, and draw alike, or draw what differs inside dt::rank_local_random",
          differing, mesh.ranks()[0]);
}

}  // namespace

void set_generator_check(GeneratorCheck check) { current_check = check; }
GeneratorCheck generator_check() { return current_check; }

void check_generators(const DeviceMesh& mesh) { compare("check_generators", World::current().generator(), mesh); }

namespace rng {

namespace {

// A generator that came from clone() counts no weak references rightly, so it is held.
struct Owner {
  at::Generator generator;
  World* world;
};

struct Owners {
  std::mutex mutex;
  std::map<c10::GeneratorImpl*, Owner> of;
};

Owners& owners() {
  static auto* instance = new Owners;  // outlives every thread
  return *instance;
}

// The caller holds the mutex.
template <class Which>
void forget(const Which& which) {
  for (auto it = owners().of.begin(); it != owners().of.end();) it = which(it->second) ? owners().of.erase(it) : std::next(it);
}

// The first distributed operand of an operator, or an undefined tensor.
at::Tensor distributed(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && is_dtensor(value.toTensor())) return value.toTensor();
  }
  return {};
}

bool makes_distributed(c10::ArrayRef<c10::IValue> arguments) {
  const auto is_tensor = [](const c10::IValue& value) { return value.isTensor(); };
  return Spmd::current() && c10::impl::tls_is_dispatch_key_included(kDTensorKey) && !c10::impl::tls_is_dispatch_key_excluded(kDTensorKey) &&
         std::ranges::none_of(arguments, is_tensor);
}

}  // namespace

void check_owner(const at::Generator& generator, World& world) {
  auto* impl = generator.unsafeGetGeneratorImpl();
  if (world.size() == 1 || impl == world.generator().unsafeGetGeneratorImpl() || c10::impl::tls_is_dispatch_key_excluded(kDTensorKey))
    return;
  std::lock_guard<std::mutex> lock(owners().mutex);
  if (owners().of.size() > 100) forget([](const Owner& owner) { return owner.generator.getIntrusivePtr().use_count() == 1; });
  const auto& owner = owners().of.try_emplace(impl, Owner{generator, &world}).first->second;
  require(owner.world == &world, "generator",
          "ranks {} and {}, threads of one process, draw from one at::Generator, which can only follow one of them; "
          "hint: make it on each rank (at::make_generator, or clone() of a shared one)",
          owner.world->rank(), world.rank());
}

void forget_owner(World& world) {
  std::lock_guard<std::mutex> lock(owners().mutex);
  forget([&](const Owner& owner) { return owner.world == &world; });
}

void check_draw(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const at::Generator& generator) {
  const auto tensor = distributed(arguments);
  if (tensor.defined()) {
    const auto& layout = DTensor(tensor).layout();
    check_draw(op.schema().name(), layout.mesh(), layout.placements(), generator);
  } else if (makes_distributed(arguments)) {
    const auto mesh = *Spmd::current();
    check_draw(op.schema().name(), mesh, Placements(mesh.ndim(), replicate()), generator);
  }
}

void check_draw(std::string_view op, const DeviceMesh& mesh, PlacementsRef placements, const at::Generator& generator) {
  if (RankLocalRandom::active()) {
    for (int64_t d = 0; d < mesh.ndim(); ++d) {
      require(placements[d].cuts() || mesh.size(d) == 1, op,
              "a tensor that is {} would get other values on each rank; got placements {} on {}; hint: draw it outside of "
              "dt::rank_local_random",
              placements[d].is_partial() ? "Partial" : "replicated", str(placements), mesh.str());
    }
    return;
  }
  if (current_check == GeneratorCheck::off || mesh.size() == 1) return;
  const int64_t drawn = dispatch::compared(mesh).draws++;
  if (current_check == GeneratorCheck::always || dispatch::Compared::is_due(drawn)) compare(op, generator, mesh);
}

}  // namespace rng
}  // namespace dtensor
