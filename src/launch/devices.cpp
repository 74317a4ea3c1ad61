// Finds the CUDA devices of ranks.
#include "src/launch/devices.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/reduce.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <range/v3/numeric/iota.hpp>

#include <exception>
#include <optional>

namespace dtensor::detail {

namespace {

int count_devices() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
}

// Whether `mine` holds on every rank.
bool on_every_rank(comm::Transport& host, bool mine) {
  if (host.size() == 1) return mine;
  std::vector<int> ranks(host.size());
  ranges::iota(ranks, 0);
  const auto vote = comm::empty({1}, c10::ScalarType::Bool);
  *vote.data_ptr<bool>() = mine;
  return *host.connect("launch", ranks)->all_reduce(vote, ReduceOp::min).get().data_ptr<bool>();
}

}  // namespace

std::optional<int> device_of(const LauncherRank& launched, int devices, const ReadVariable& read) {
  const auto local = launched.size == 1 ? launched.local_rank.value_or(0) : launched.local_rank;
  if (!local) return std::nullopt;
  if (*local < devices) return local;
  if (devices == 1 && read("CUDA_VISIBLE_DEVICES")) return 0;  // the launcher gave each its own
  return std::nullopt;
}

std::optional<int> device_of(const LauncherRank& launched) {
  const auto device = device_of(launched, count_devices());
  return device ? device : launched.local_rank;  // one without a device of its own is refused by name
}

std::unique_ptr<comm::Transport> with_devices(std::unique_ptr<comm::Transport> host, const LauncherRank& launched) {
  if (!comm::has_nccl_transport()) return host;
  const auto device = device_of(launched, count_devices());
  if (!on_every_rank(*host, comm::can_use_nccl_transport() && device)) return host;
  return comm::make_nccl_transport(std::move(host), *device);
}

}  // namespace dtensor::detail
