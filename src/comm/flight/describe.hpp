// Calls in words.
#pragma once

#include "src/comm/flight/ring.hpp"

#include <string>

namespace dtensor::comm::flight {

inline bool reduces(const Event& call) { return call.kind == Collective::all_reduce || call.kind == Collective::reduce_scatter; }
// What the other end of a message calls, or of a signal; of all else its own kind.
inline Collective other_end(Collective kind) {
  switch (kind) {
    case Collective::send: return Collective::recv;
    case Collective::recv: return Collective::send;
    case Collective::signal: return Collective::wait;
    case Collective::wait: return Collective::signal;
    default: return kind;
  }
}
inline bool is_message(const Event& call) { return other_end(call.kind) != call.kind; }
// Nobody waits for it.
inline bool is_one_sided(const Event& call) { return call.kind == Collective::put || call.kind == Collective::get; }

// "all_reduce(sum) #7 of float32[12] in group 'dp' by aten::mm for layers.3". With the call's group, a root or peer that has another number
// in the world is named so too: "recv(from 1 (rank 3), tag 0) #2 ...".
std::string describe(const Event& call, const RingGroup* group = nullptr);

}  // namespace dtensor::comm::flight
