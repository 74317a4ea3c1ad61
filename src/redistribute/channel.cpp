// Messages from one mesh to another.
#include <dtensor/redistribute/channel.hpp>

#include "src/mesh/world_state.hpp"
#include "src/redistribute/mesh_move.hpp"
#include "src/redistribute/transition.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/ranges.h>
#include <range/v3/action/push_back.hpp>

#include <algorithm>

namespace dtensor {

using redistribute::MeshMove;

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
  const auto move = MeshMove::find(before, after);
  redistribute::check_local(given, *before);
  const auto local = before->is_flat() ? redistribute::dense(given) : given;
  const auto elements = move->outgoing(local, local.options(), /*may_share=*/true);
  std::vector<comm::WorkPtr> works;
  for_each_peer(move->send_counts(),
                [&](int peer, int64_t begin, int64_t count) { add_work(works, group_->send(elements.narrow(0, begin, count), peer)); });
  return works;
}

comm::Async MeshChannel::receive(const LayoutPtr& before, const LayoutPtr& after, bool values) const {
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};
  const auto move = MeshMove::find(before, after);
  require(move->has_after(), kChannel, "this rank receives nothing: it is not in {}", after->mesh().str());
  const auto device = values ? after->mesh().device_type() : at::kMeta;
  const auto options = at::TensorOptions(c10::Device(device)).dtype(after->dtype());
  const auto result = move->with_kept({}, *after, options);
  std::vector<comm::WorkPtr> works;
  std::vector<at::Tensor> parts;
  for_each_peer(move->receive_counts(), [&](int peer, int64_t, int64_t count) {
    auto part = group_->recv(at::empty({count}, options), peer);
    parts.push_back(part.tensor);
    add_work(works, std::move(part));
  });
  comm::Async received;
  if (!works.empty()) received.work = c10::make_intrusive<comm::AllOf>(std::move(works));
  if (parts.size() == 1) {
    received.tensor = parts[0];
    return MeshMove::unpack(move, std::move(received), result);
  }
  return redistribute::then(received, result, [parts, result, move] {
    if (!parts.empty() && !result.is_meta()) move->put(at::cat(parts), result);
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
