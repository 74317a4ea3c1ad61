// What happens on a mesh that this rank is not in is worked out here too, from sizes alone: every rank knows the layouts.
#pragma once

#include <dtensor/comm/communicator.hpp>

#include <memory>
#include <string>
#include <vector>

namespace dtensor::detail {

// While it lives, in this thread, the rank stands in for the first rank of each mesh that it is not in: coordinate() is that rank's, and
// groups are without peers.
class StandIn {
 public:
  StandIn();
  ~StandIn();
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;
  static bool active();
};

// A group as its first rank sees it, but that nobody else is there, and nothing is recorded. For tensors without values.
std::shared_ptr<comm::Communicator> without_peers(const std::string& name, const std::vector<int>& ranks, int world_size);

}  // namespace dtensor::detail
