// How far the clocks of ranks are apart.
#pragma once

#include <dtensor/comm/communicator.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace dtensor::trace {

using Clock = std::function<int64_t()>;  // nanoseconds

// What is to be added to this rank's times so that they are those of the group's first rank. Collective. Ranks whose clock is the first
// one's, as `id` tells, get 0; each other rank exchanges some messages with the first, and takes the exchange that was shortest: the error
// is at most half of that.
int64_t offset_to_first(comm::Communicator& group, const std::string& id, const Clock& now);

// Names this host's clock, until it is started again.
std::string clock_id();

}  // namespace dtensor::trace
