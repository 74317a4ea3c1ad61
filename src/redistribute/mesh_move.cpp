#include "src/redistribute/mesh_move.hpp"

#include "src/mesh/world_state.hpp"
#include "src/redistribute/between_plan.hpp"
#include "src/redistribute/plan_cache.hpp"
#include "src/redistribute/transition.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/alias.hpp>
#include <dtensor/mesh/two_meshes.hpp>
#include <dtensor/mesh/world.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace dtensor::redistribute {

namespace {

constexpr const char* kTag = "redistribute";

struct MoveCache {
  struct Entry {
    LayoutPtr from, to;
    std::shared_ptr<const MeshMove> move;
  };
  static constexpr size_t kCapacity = 1024;
  std::mutex mutex;
  std::unordered_map<std::pair<const Layout*, const Layout*>, Entry, dtensor::detail::PlanCache::Hash> entries;
};

void check(const Layout& from, const Layout& to) {
  if (&from.mesh().world() != &to.mesh().world()) {
    fail(kTag, "cannot move a tensor between worlds; got {} and {}; {}", from.mesh().str(), to.mesh().str(),
         why_two(from.mesh(), to.mesh()));
  }
  if (from.mesh().device_type() != to.mesh().device_type()) {
    fail(kTag, "cannot move a tensor between kinds of devices; got {} and {}", from.mesh().str(), to.mesh().str());
  }
  if (from.sizes() != to.sizes() || from.dtype() != to.dtype()) {
    fail(kTag, "the layouts are of different tensors; got {} and {}; expected equal sizes and dtypes", from.str(), to.str());
  }
  if (from.has_partial()) {
    fail(kTag, "a pending value does not move to another mesh; got {}; hint: reduce it on its own mesh first", from.str());
  }
  for (const auto& placement : to.placements()) {
    if (placement.is_partial(ReduceOp::norm2)) {
      fail(kTag, "a move to another mesh cannot leave a norm pending; got {}; hint: move it to R, and there to P(norm2)", to.str());
    }
  }
}

std::vector<int64_t> counts_of(const std::vector<Transfer>& transfers, const std::vector<int>& ranks, int Transfer::*peer) {
  std::vector<int64_t> counts(ranks.size());
  for (const auto& transfer : transfers) {
    counts[std::ranges::lower_bound(ranks, transfer.*peer) - ranks.begin()] += transfer.numel();
  }
  return counts;
}

// Copies between pieces and a list in which they lie one after the other.
template <class Copy>
void for_each_piece(const at::Tensor& list, const at::Tensor& local, const BoxesOfShard& shard, const std::vector<ShardPiece>& pieces,
                    Copy copy) {
  int64_t begin = 0;
  for (const auto& piece : pieces) {
    copy(dtensor::detail::alias(list, piece.sizes, contiguous_strides(piece.sizes), list.storage_offset() + begin),
         shard.view(local, piece));
    begin += piece.numel;
  }
}

}  // namespace

MeshMove::MeshMove(const Layout& from, const Layout& to) {
  check(from, to);
  plan_ = find_plan_between(from, to, from.mesh().world().rank());
  if (!from.is_absent()) before_ = std::make_unique<const BoxesOfShard>(from, from.mesh().coordinate());
  if (!to.is_absent()) after_ = std::make_unique<const BoxesOfShard>(to, to.mesh().coordinate());
  for (const auto& sent : plan_.sent) sent_.push_back(before_->find(sent.box));
  for (const auto& received : plan_.received) received_.push_back(after_->find(received.box));
  for (const auto& kept : plan_.kept) {
    kept_.push_back(before_->find(kept.box));
    kept_at_.push_back(after_->find(kept.box));
  }
  send_counts_ = counts_of(plan_.sent, plan_.ranks, &Transfer::to);
  receive_counts_ = counts_of(plan_.received, plan_.ranks, &Transfer::from);
  if (!to.is_absent()) identity_ = identity_of(to, to.mesh().coordinate());
}

MeshMove::~MeshMove() = default;

std::shared_ptr<const MeshMove> MeshMove::find(const LayoutPtr& from, const LayoutPtr& to) {
  auto& cache = from->mesh().world().local<MoveCache>();
  const std::pair<const Layout*, const Layout*> key{from.get(), to.get()};
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    if (const auto found = cache.entries.find(key); found != cache.entries.end()) return found->second.move;
  }
  auto move = std::make_shared<const MeshMove>(*from, *to);
  decltype(cache.entries) forgotten;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(cache.mutex);
  if (cache.entries.size() >= MoveCache::kCapacity) forgotten.swap(cache.entries);
  cache.entries.insert_or_assign(key, MoveCache::Entry{from, to, move});
  return move;
}

at::Tensor MeshMove::outgoing(const at::Tensor& local, const at::TensorOptions& options, bool may_share) const {
  const bool is_all = sent_.size() == 1 && sent_[0].numel == local.numel();
  if (may_share && is_all && local.is_contiguous()) return local.view({-1});
  const auto list = at::empty({c10::sum_integers(send_counts_)}, options);
  if (list.is_meta() || sent_.empty()) return list;
  for_each_piece(list, local, *before_, sent_, [](const at::Tensor& in_list, const at::Tensor& in_shard) { in_list.copy_(in_shard); });
  return list;
}

at::Tensor MeshMove::with_kept(const at::Tensor& local, const Layout& to, const at::TensorOptions& options) const {
  if (identity_) return at::full(to.local_sizes(), *identity_, options);
  const auto result = at::empty(to.local_sizes(), options);
  for (size_t i = 0; i < kept_.size() && !result.is_meta(); ++i) {
    after_->view(result, kept_at_[i]).copy_(before_->view(local, kept_[i]));
  }
  return result;
}

void MeshMove::put(const at::Tensor& received, const at::Tensor& result) const {
  for_each_piece(received, result, *after_, received_,
                 [](const at::Tensor& in_list, const at::Tensor& in_shard) { in_shard.copy_(in_list); });
}

comm::Async MeshMove::unpack(const std::shared_ptr<const MeshMove>& move, comm::Async received, const at::Tensor& result) {
  if (!move->after_) return {at::Tensor(), std::move(received.work)};
  if (result.is_meta() || move->received_.empty()) return {result, std::move(received.work)};
  const auto& first = move->received_[0];
  const bool is_all = first.numel == result.numel() && move->after_->view(result, first).is_contiguous();
  if (is_all) return {received.tensor.view(result.sizes()), std::move(received.work)};
  return then(received, result, [list = received.tensor, result, move] { move->put(list, result); });
}

void check_local(const at::Tensor& local, const Layout& layout) {
  if (local.defined() && local.sizes() == layout.local_sizes() && local.scalar_type() == layout.dtype()) return;
  fail(kTag, "the local tensor does not fit its layout {}; expected [{}]", layout.str(), fmt::join(layout.local_sizes(), ", "));
}

}  // namespace dtensor::redistribute
