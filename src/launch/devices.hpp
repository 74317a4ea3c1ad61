// Which CUDA device a rank has, and whether a job's tensors go over NCCL.
#pragma once

#include <dtensor/comm/transport.hpp>

#include "src/launch/environment.hpp"

namespace dtensor::detail {

// The device of a rank of this process's host where `devices` are seen: that of its number among the host's ranks, or the only one that is
// left visible to it. Empty when there is none.
std::optional<int> device_of(const LauncherRank& launched, int devices, const ReadVariable& read = read_environment);

// The same of this machine; else the rank's number among those of its host, where the launcher says it.
std::optional<int> device_of(const LauncherRank& launched);

// `host`, or NCCL on top of it where every rank has a device.
std::unique_ptr<comm::Transport> with_devices(std::unique_ptr<comm::Transport> host, const LauncherRank& launched);

}  // namespace dtensor::detail
