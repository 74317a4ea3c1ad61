// Several ranks of a world that is not there, for dry runs of a pipeline.
#pragma once

#include <dtensor/comm/transport.hpp>

#pragma GCC visibility push(default)

namespace dtensor::comm {

// As make_fake_transport(), for ranks each of which a thread of this process plays: messages between these arrive, and a rank that leaves
// with an error ends the others' waiting. Element i is for ranks[i].
std::vector<std::unique_ptr<Transport>> make_fake_transports(const std::vector<int>& ranks, int size);

}  // namespace dtensor::comm

#pragma GCC visibility pop
