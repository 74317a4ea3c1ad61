// Finds which CUDA device a rank has, and whether a job uses NCCL.
#pragma once

#include <dtensor/comm/transport.hpp>

#include "src/launch/environment.hpp"

namespace dtensor::detail {

// The device of this rank, of the `devices` that it sees: the one with the rank's number among the host's ranks, or the only one that is
// visible to it. Empty if there is none.
std::optional<int> device_of(const LauncherRank& launched, int devices, const ReadVariable& read = read_environment);

// The same on this machine. If there is no such device: the rank's number among the host's ranks, if the launcher tells it.
std::optional<int> device_of(const LauncherRank& launched);

// Returns NCCL on top of `host` if every rank has a device, else `host`.
std::unique_ptr<comm::Transport> with_devices(std::unique_ptr<comm::Transport> host, const LauncherRank& launched);

}  // namespace dtensor::detail
