// Moving a local tensor between two meshes.
#include <dtensor/redistribute/between_meshes.hpp>

#include "src/mesh/world_state.hpp"
#include "src/redistribute/mesh_move.hpp"
#include "src/redistribute/transition.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/mesh/world.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/ranges.h>
#include <range/v3/numeric/accumulate.hpp>

#include <map>

namespace dtensor {

using redistribute::MeshMove;

namespace {

// The ranks of both meshes. Moves one way and the other are calls of two groups, so that neither has to wait for the other's turn.
comm::Communicator& group_of(const Layout& from, const Layout& to, const std::vector<int>& ranks) {
  const auto name = [](const DeviceMesh& mesh) { return fmt::format("{} of rank {}", fmt::join(mesh.names(), "+"), mesh.ranks().front()); };
  return *from.mesh().world().state().connect(fmt::format("{} to {}", name(from.mesh()), name(to.mesh())), ranks);
}

}  // namespace

int64_t Transfer::numel() const { return ranges::accumulate(box, int64_t{1}, std::multiplies<>(), &Interval::length); }

std::string MeshMovePlan::str() const {
  const auto list = [](const std::vector<Transfer>& transfers, int Transfer::*peer, const char* way) {
    std::map<int, int64_t> elements;
    for (const auto& transfer : transfers) elements[transfer.*peer] += transfer.numel();
    std::vector<std::string> lines;
    for (const auto& [rank, count] : elements) lines.push_back(fmt::format("{} {} rank {}", count, way, rank));
    return lines.empty() ? "nothing" : fmt::format("{}", fmt::join(lines, ", "));
  };
  int64_t stay = 0;
  for (const auto& transfer : kept) stay += transfer.numel();
  return fmt::format("sends {}; receives {}; keeps {}", list(sent, &Transfer::to, "to"), list(received, &Transfer::from, "from"), stay);
}

MeshMovePlan plan_move_between(const LayoutPtr& from, const LayoutPtr& to) { return MeshMove::find(from, to)->plan(); }

comm::Async move_local_between(const at::Tensor& given, const LayoutPtr& from, const LayoutPtr& to) {
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};  // local tensors stay plain inside Spmd
  const auto move = MeshMove::find(from, to);
  if (!move->has_before() && !move->has_after()) return {};
  if (move->has_before()) redistribute::check_local(given, *from);
  const auto local = !move->has_before()                                    ? at::Tensor()
                     : from->is_flat() || given.is_conj() || given.is_neg() ? redistribute::dense(given)
                                                                            : given;
  const auto options = local.defined() ? local.options() : at::TensorOptions(c10::Device(to->mesh().device_type())).dtype(to->dtype());
  const auto result = move->has_after() ? move->with_kept(local, *to, options) : at::Tensor();
  if (!move->plan().communicates) return {result, {}};
  auto& group = group_of(*from, *to, move->plan().ranks);
  const comm::Subject subject("a move between meshes");
  auto received = group.all_to_all(move->outgoing(local, options), move->send_counts(), move->receive_counts());
  return MeshMove::unpack(move, std::move(received), result);
}

}  // namespace dtensor
