#include "src/mesh/stand_in.hpp"

#include <dtensor/comm/transport.hpp>

namespace dtensor::detail {

namespace {
thread_local int stand_ins = 0;
}

StandIn::StandIn() { ++stand_ins; }
StandIn::~StandIn() { --stand_ins; }
bool StandIn::active() { return stand_ins > 0; }

std::shared_ptr<comm::Communicator> without_peers(const std::string& name, const std::vector<int>& ranks, int world_size) {
  auto group = comm::make_fake_transport(ranks.front(), world_size)->connect(name, ranks);
  group->leave_no_events();
  return group;
}

}  // namespace dtensor::detail
