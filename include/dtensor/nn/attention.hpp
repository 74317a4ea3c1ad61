// Scaled dot-product attention (Vaswani et al., "Attention Is All You Need", 2017).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dtensor::nn {

struct AttentionOptions {
  bool causal = false;  // a position attends to itself and those before it
  double dropout = 0;   // of the weights
};

// softmax(q k^T / sqrt(dim)) v, for each head by itself: q, k and v [batch, heads, length, dim] -> [batch, heads, length, dim]. Calls
// libtorch's kernel where there is one. Communicates nothing when batch and heads are sharded.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options = {});

// Repeats every head `times` times in a row: [batch, length, heads, dim] -> [batch, length, heads * times, dim]. Grouped-query attention
// does this to keys and values.
at::Tensor repeat_heads(const at::Tensor& x, int64_t times);

}  // namespace dtensor::nn
