// What a kernel of block attention is given.
#pragma once

#include <dtensor/parallel/context/attended.hpp>

#pragma GCC visibility push(default)

namespace dtensor::context {

struct AttentionCall {
  std::vector<const BlockMask*> masks;  // of each row of the batch, or one for all
  double scale = 1;                     // of the scores
};

// The gradient of an output of all keys that the queries saw. `grad` is like q, `lse` that of all keys, and `delta` [batch, heads, queries]
// the sums over dim of the output and its gradient. `out` is the output in the dtype of q, or undefined where it is not at hand.
struct OutputGradient {
  at::Tensor grad, lse, delta, out;
};

struct BlockGradients {
  at::Tensor dq, dk, dv;
};

}  // namespace dtensor::context

#pragma GCC visibility pop
