// Calls in words.
#pragma once

#include "src/comm/flight/ring.hpp"

#include <string>

namespace dtensor::comm::flight {

inline bool reduces(const Event& call) { return call.kind == Collective::all_reduce || call.kind == Collective::reduce_scatter; }
inline bool is_message(const Event& call) { return call.kind == Collective::send || call.kind == Collective::recv; }

// "all_reduce(sum) #7 of float32[12] in group 'dp' by aten::mm for layers.3". With the call's group, a root or peer that has another number
// in the world is named so too: "recv(from 1 (rank 3), tag 0) #2 ...".
std::string describe(const Event& call, const RingGroup* group = nullptr);

}  // namespace dtensor::comm::flight
