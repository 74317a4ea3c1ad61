// Moving a local tensor between two meshes: checks, the cache of plans, and running one.
#include <dtensor/redistribute/between_meshes.hpp>
#include <dtensor/redistribute/channel.hpp>

#include "src/mesh/world_state.hpp"
#include "src/redistribute/between_plan.hpp"
#include "src/redistribute/plan_cache.hpp"
#include "src/redistribute/transition.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/alias.hpp>
#include <dtensor/mesh/two_meshes.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>
#include <range/v3/action/push_back.hpp>
#include <range/v3/numeric/accumulate.hpp>

#include <algorithm>

namespace dtensor {

namespace {

constexpr const char* kTag = "redistribute";

// Where a box lies in a rank's shard: the first element's position, as seen before a flat cut, and the lengths.
struct Piece {
  Sizes position, sizes;
  int64_t numel = 0;
};

// A rank's shard, in which boxes of global elements are found.
class LocalShard {
 public:
  LocalShard(const Layout& layout, c10::IntArrayRef coordinate) : flat_(layout.is_flat()) {
    for (int64_t d = 0; d < layout.ndim(); ++d) held_.push_back(layout.intervals(d, coordinate));
    if (!flat_) return;
    begin_ = layout.flat_shard(coordinate).begin;
    const auto sizes = layout.local_sizes_before(layout.mesh().ndim(), coordinate);
    strides_.resize(sizes.size());
    const auto order = memory_order(layout.strides());
    int64_t step = 1;
    for (size_t i = order.size(); i-- > 0; step *= std::max<int64_t>(sizes[order[i]], 1)) strides_[order[i]] = step;
  }

  Piece find(const std::vector<Interval>& box) const {
    Piece piece{{}, {}, 1};
    for (size_t d = 0; d < box.size(); ++d) {
      int64_t before = 0;
      for (const auto& held : held_[d]) {
        if (held.end > box[d].begin) {
          piece.position.push_back(before + box[d].begin - held.begin);
          break;
        }
        before += held.length();
      }
      piece.sizes.push_back(box[d].length());
      piece.numel *= box[d].length();
    }
    return piece;
  }

  // `local` is dense where it is flat.
  at::Tensor view(const at::Tensor& local, const Piece& piece) const {
    const auto strides = flat_ ? c10::IntArrayRef(strides_) : local.strides();
    int64_t offset = local.storage_offset() - begin_;
    for (size_t d = 0; d < piece.position.size(); ++d) offset += piece.position[d] * strides[d];
    return detail::alias(local, piece.sizes, strides, offset);
  }

 private:
  bool flat_;
  std::vector<Intervals> held_;
  Sizes strides_;
  int64_t begin_ = 0;
};

// A plan, and where its boxes lie in this rank's shards.
struct Prepared {
  MeshMovePlan plan;
  std::vector<Piece> sent, received, kept, kept_at;
  std::vector<int64_t> send_counts, receive_counts;  // by position in plan.ranks
  std::unique_ptr<const LocalShard> before, after;         // null: this rank has none
  std::optional<int> identity;                       // see identity_of()
};

struct PreparedCache {
  struct Entry {
    LayoutPtr from, to;
    std::shared_ptr<const Prepared> prepared;
  };
  static constexpr size_t kCapacity = 1024;
  std::mutex mutex;
  std::unordered_map<std::pair<const Layout*, const Layout*>, Entry, detail::PlanCache::Hash> entries;
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

std::shared_ptr<const Prepared> prepare(const Layout& from, const Layout& to) {
  check(from, to);
  Prepared prepared;
  prepared.plan = redistribute::find_plan_between(from, to, from.mesh().world().rank());
  const auto& plan = prepared.plan;
  if (!from.is_absent()) prepared.before = std::make_unique<const LocalShard>(from, from.mesh().coordinate());
  if (!to.is_absent()) prepared.after = std::make_unique<const LocalShard>(to, to.mesh().coordinate());
  for (const auto& sent : plan.sent) prepared.sent.push_back(prepared.before->find(sent.box));
  for (const auto& received : plan.received) prepared.received.push_back(prepared.after->find(received.box));
  for (const auto& kept : plan.kept) {
    prepared.kept.push_back(prepared.before->find(kept.box));
    prepared.kept_at.push_back(prepared.after->find(kept.box));
  }
  prepared.send_counts = counts_of(plan.sent, plan.ranks, &Transfer::to);
  prepared.receive_counts = counts_of(plan.received, plan.ranks, &Transfer::from);
  if (!to.is_absent()) prepared.identity = redistribute::identity_of(to, to.mesh().coordinate());
  return std::make_shared<const Prepared>(std::move(prepared));
}

std::shared_ptr<const Prepared> cached(const LayoutPtr& from, const LayoutPtr& to) {
  auto& cache = from->mesh().world().local<PreparedCache>();
  const std::pair<const Layout*, const Layout*> key{from.get(), to.get()};
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    if (const auto found = cache.entries.find(key); found != cache.entries.end()) return found->second.prepared;
  }
  auto prepared = prepare(*from, *to);
  decltype(cache.entries) forgotten;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(cache.mutex);
  if (cache.entries.size() >= PreparedCache::kCapacity) forgotten.swap(cache.entries);
  cache.entries.insert_or_assign(key, PreparedCache::Entry{from, to, prepared});
  return prepared;
}

// The ranks of both meshes. Moves one way and the other are calls of two groups, so that neither has to wait for the other's turn.
comm::Communicator& group_of(const Layout& from, const Layout& to, const std::vector<int>& ranks) {
  const auto name = [](const DeviceMesh& mesh) { return fmt::format("{} of rank {}", fmt::join(mesh.names(), "+"), mesh.ranks().front()); };
  return *from.mesh().world().state().connect(fmt::format("{} to {}", name(from.mesh()), name(to.mesh())), ranks);
}

// Copies between pieces and a list in which they lie one after the other.
template <class Copy>
void for_each_piece(const at::Tensor& list, const at::Tensor& local, const LocalShard& part, const std::vector<Piece>& pieces, Copy copy) {
  int64_t begin = 0;
  for (const auto& piece : pieces) {
    copy(detail::alias(list, piece.sizes, contiguous_strides(piece.sizes), list.storage_offset() + begin), part.view(local, piece));
    begin += piece.numel;
  }
}

void check_local(const at::Tensor& local, const Layout& layout) {
  if (local.defined() && local.sizes() == layout.local_sizes() && local.scalar_type() == layout.dtype()) return;
  fail(kTag, "the local tensor does not fit its layout {}; expected [{}]", layout.str(), fmt::join(layout.local_sizes(), ", "));
}

int64_t total(const std::vector<int64_t>& counts) { return c10::sum_integers(counts); }

at::Tensor pack(const at::Tensor& local, const Prepared& prepared, const at::TensorOptions& options) {
  const auto list = at::empty({total(prepared.send_counts)}, options);
  if (list.is_meta() || prepared.sent.empty()) return list;
  for_each_piece(list, local, *prepared.before, prepared.sent,
                 [](const at::Tensor& in_list, const at::Tensor& in_part) { in_list.copy_(in_part); });
  return list;
}

// This rank's shard under `to`, with what it had already.
at::Tensor with_kept(const at::Tensor& local, const Prepared& prepared, const Layout& to, const at::TensorOptions& options) {
  if (prepared.identity) return at::full(to.local_sizes(), *prepared.identity, options);
  const auto result = at::empty(to.local_sizes(), options);
  for (size_t i = 0; i < prepared.kept.size() && !result.is_meta(); ++i) {
    prepared.after->view(result, prepared.kept_at[i]).copy_(prepared.before->view(local, prepared.kept[i]));
  }
  return result;
}

// Puts what came in its place in `result`.
comm::Async unpack(comm::Async received, const at::Tensor& result, const std::shared_ptr<const Prepared>& prepared) {
  if (!prepared->after) return {at::Tensor(), std::move(received.work)};
  if (result.is_meta() || prepared->received.empty()) return {result, std::move(received.work)};
  const auto& first = prepared->received[0];
  const bool is_all = first.numel == result.numel() && prepared->after->view(result, first).is_contiguous();
  if (is_all) return {received.tensor.view(result.sizes()), std::move(received.work)};
  return redistribute::then(received, result, [list = received.tensor, result, prepared] {
    for_each_piece(list, result, *prepared->after, prepared->received,
                   [](const at::Tensor& in_list, const at::Tensor& in_part) { in_part.copy_(in_list); });
  });
}

}  // namespace

int64_t Transfer::numel() const {
  return ranges::accumulate(box, int64_t{1}, std::multiplies<>(), &Interval::length);
}

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

MeshMovePlan plan_move_between(const LayoutPtr& from, const LayoutPtr& to) { return cached(from, to)->plan; }

comm::Async move_local_between(const at::Tensor& given, const LayoutPtr& from, const LayoutPtr& to) {
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};  // local tensors stay plain inside Spmd
  const auto prepared = cached(from, to);
  const auto& plan = prepared->plan;
  if (!prepared->before && !prepared->after) return {};
  if (prepared->before) check_local(given, *from);
  const auto local = !prepared->before                                      ? at::Tensor()
                     : from->is_flat() || given.is_conj() || given.is_neg() ? redistribute::dense(given)
                                                                            : given;
  const auto options = local.defined() ? local.options() : at::TensorOptions(c10::Device(to->mesh().device_type())).dtype(to->dtype());
  const auto result = prepared->after ? with_kept(local, *prepared, *to, options) : at::Tensor();
  if (!plan.communicates) return {result, {}};
  auto& group = group_of(*from, *to, plan.ranks);
  auto received = group.all_to_all(pack(local, *prepared, options), prepared->send_counts, prepared->receive_counts);
  return unpack(std::move(received), result, prepared);
}

// -- Messages ------------------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kChannel = "MeshChannel";

std::vector<int> ranks_of_both(const DeviceMesh& from, const DeviceMesh& to) {
  auto ranks = from.ranks();
  ranges::push_back(ranks, to.ranks());
  std::ranges::sort(ranks);
  require(std::ranges::adjacent_find(ranks) == ranks.end(), kChannel,
          "the meshes share ranks; got {} and {}; hint: dt::redistribute moves there", from.str(), to.str());
  return ranks;
}

// Calls f(position of the peer, first element, count) for what goes to, or comes from, each peer.
template <class F>
void for_each_peer(const std::vector<int64_t>& counts, F f) {
  int64_t begin = 0;
  for (size_t peer = 0; peer < counts.size(); ++peer) {
    if (counts[peer] > 0) f(static_cast<int>(peer), begin, counts[peer]);
    begin += counts[peer];
  }
}

// What is sent: without a copy where it is all of a contiguous tensor.
at::Tensor outgoing_elements(const at::Tensor& local, const Prepared& prepared) {
  const auto& sent = prepared.sent;
  if (sent.size() == 1 && sent[0].numel == local.numel() && local.is_contiguous()) return local.view({-1});
  return pack(local, prepared, local.options());
}

void add_work(std::vector<comm::WorkPtr>& works, comm::Async async) {
  if (async.work) works.push_back(std::move(async.work));
}

}  // namespace

MeshChannel::MeshChannel(const DeviceMesh& from, const DeviceMesh& to) : from_(from), to_(to) {
  const auto ranks = ranks_of_both(from, to);
  require(from.contains_this_rank() || to.contains_this_rank(), kChannel, "this rank is in neither mesh; got {} and {}", from.str(),
          to.str());
  const auto name = fmt::format("{} {} to {}", fmt::join(from.names(), "+"), from.ranks().front(), to.ranks().front());
  group_ = from.world().state().connect(name, ranks);
}

std::vector<comm::WorkPtr> MeshChannel::send(const at::Tensor& given, const LayoutPtr& before, const LayoutPtr& after) const {
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};
  const auto prepared = cached(before, after);
  check_local(given, *before);
  const auto elements = outgoing_elements(before->is_flat() ? redistribute::dense(given) : given, *prepared);
  std::vector<comm::WorkPtr> works;
  for_each_peer(prepared->send_counts,
                [&](int peer, int64_t begin, int64_t count) { add_work(works, group_->send(elements.narrow(0, begin, count), peer)); });
  return works;
}

comm::Async MeshChannel::receive(const LayoutPtr& before, const LayoutPtr& after, bool values) const {
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};
  const auto prepared = cached(before, after);
  require(prepared->after != nullptr, kChannel, "this rank receives nothing: it is not in {}", after->mesh().str());
  const auto device = values ? after->mesh().device_type() : at::kMeta;
  const auto options = at::TensorOptions(c10::Device(device)).dtype(after->dtype());
  const auto result = with_kept({}, *prepared, *after, options);
  std::vector<comm::WorkPtr> works;
  std::vector<at::Tensor> parts;
  for_each_peer(prepared->receive_counts, [&](int peer, int64_t, int64_t count) {
    auto part = group_->recv(at::empty({count}, options), peer);
    parts.push_back(part.tensor);
    add_work(works, std::move(part));
  });
  comm::Async received;
  if (!works.empty()) received.work = c10::make_intrusive<comm::AllOf>(std::move(works));
  if (parts.size() == 1) {
    received.tensor = parts[0];
    return unpack(std::move(received), result, prepared);
  }
  return redistribute::then(received, result, [parts, result, prepared] {
    if (parts.empty() || result.is_meta()) return;
    for_each_piece(at::cat(parts), result, *prepared->after, prepared->received,
                   [](const at::Tensor& in_list, const at::Tensor& in_part) { in_part.copy_(in_list); });
  });
}

std::vector<comm::WorkPtr> MeshChannel::send_numbers(const std::vector<int64_t>& numbers) const {
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};
  const auto device = c10::Device(from_.device_type());
  const auto list = at::tensor(numbers, at::kLong).to(device), count = at::full({1}, static_cast<int64_t>(numbers.size()), list.options());
  std::vector<comm::WorkPtr> works;
  for (size_t i = 0; i < to_.ranks().size(); ++i) {
    if (from_.ranks()[i % from_.ranks().size()] != from_.world().rank()) continue;
    const int peer = position(to_.ranks()[i]);
    add_work(works, group_->send(count, peer));
    if (!numbers.empty()) add_work(works, group_->send(list, peer));
  }
  return works;
}

std::vector<int64_t> MeshChannel::receive_numbers() const {
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};
  const auto own = std::ranges::find(to_.ranks(), to_.world().rank()) - to_.ranks().begin();
  const int peer = position(from_.ranks()[own % from_.ranks().size()]);
  const auto options = at::TensorOptions(c10::Device(to_.device_type())).dtype(at::kLong);
  const auto count = group_->recv(at::empty({1}, options), peer).get().item<int64_t>();
  std::vector<int64_t> numbers(count);
  if (count == 0) return numbers;
  const auto list = group_->recv(at::empty({count}, options), peer).get().cpu();
  std::copy_n(list.data_ptr<int64_t>(), count, numbers.begin());
  return numbers;
}

int MeshChannel::position(int rank) const { return static_cast<int>(std::ranges::find(group_->ranks(), rank) - group_->ranks().begin()); }

}  // namespace dtensor
