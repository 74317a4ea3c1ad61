// What a kernel of block attention is given.
#pragma once

#include <dtensor/parallel/context/attended.hpp>
#include <dtensor/parallel/context/attention_dropout.hpp>
#include <dtensor/parallel/context/mask_pieces.hpp>

#pragma GCC visibility push(default)

namespace dtensor::context {

struct AttentionCall {
  std::vector<const MaskInPieces*> masks;  // of each row of the batch, or one for all
  double scale = 1;                        // of the scores
  // Null: nothing is dropped. Else the rows have these positions, and the first head of the queries is this one of the rank's.
  const AttentionDropout* dropout = nullptr;
  std::span<const int64_t> queries{}, keys{};
  int64_t first_head = 0;
};

// The gradient of an output of all keys that the queries saw. `grad` is like q, `lse` that of all keys. `out` is the output in the dtype of
// q, or undefined where it is not at hand; `delta` may be undefined where that dtype is the one of sums.
struct OutputGradient {
  at::Tensor grad, lse, delta, out;

  // [batch, heads, queries]: the sums over dim of the output and its gradient.
  at::Tensor deltas() const { return delta.defined() ? delta : out.mul(grad).sum(-1); }
};

// Undefined: nothing has been added yet.
struct BlockGradients {
  at::Tensor dq, dk, dv;
};

namespace detail {

inline at::Tensor with_dense_rows(const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

}  // namespace detail

}  // namespace dtensor::context

#pragma GCC visibility pop
