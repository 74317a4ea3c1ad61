// Describes a collective call or a message: what its ranks must agree on.
#pragma once

#include <dtensor/base/reduce_op.hpp>
#include <dtensor/comm/event.hpp>

#include <cstdint>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::comm {

// A call as one rank made it. Trivially copyable, so that a transport can send it as it is.
struct CallInfo {
  Collective kind{};
  ReduceOp op{};
  int8_t dtype = 0;   // c10::ScalarType
  int32_t root = 0;   // or the peer of a message, as a position in the group
  int32_t tag = 0;
  uint64_t sequence = 0;
  int64_t numel = 0;         // of the input; of the result for recv
  uint64_t counts_hash = 0;  // of the counts that all ranks share (all_gather, reduce_scatter)
  uint64_t failures = 0;     // a summary of the operators that failed on the rank
  uint64_t purpose = 0;      // a hash of what the call is for: the Cause and the Subject, whose texts below are cut
  ShortText<40> subject = {};
  ShortText<32> cause = {};

  // Whether two ranks of a collective called the same thing. Sizes are compared where all ranks must have the same one.
  bool agrees_with(const CallInfo& other) const;

  // "all_reduce(sum) #7 of f32[12]"
  std::string str() const;
};

}  // namespace dtensor::comm

#pragma GCC visibility pop
