// Scaled dot-product attention (Vaswani et al., "Attention Is All You Need", 2017).
#pragma once

#include <dtensor/parallel/context/context_parallel.hpp>

#include <ATen/core/Tensor.h>
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
#include <ATen/ops/scaled_dot_product_attention.h>
#else
#include <ATen/ops/dropout.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#endif

#include <cmath>
#include <cstdint>
#include <limits>

#pragma GCC visibility push(default)

namespace dtensor::nn {

struct AttentionOptions {
  bool causal = false;  // a position attends to itself and those before it
  double dropout = 0;   // of the weights
};

// softmax(q k^T / sqrt(dim)) v, for each head by itself: q, k and v [batch, heads, length, dim] -> [batch, heads, length, dim]. Calls
// libtorch's kernel where there is one. Communicates nothing when batch and heads are sharded. In a dt::ContextParallel, over positions
// that are cut, its method computes this; k and v may then have fewer heads, which groups share.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options = {});

// Repeats every head `times` times in a row: [batch, length, heads, dim] -> [batch, length, heads * times, dim]. Grouped-query attention
// does this to keys and values.
at::Tensor repeat_heads(const at::Tensor& x, int64_t times);

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options) {
  if (auto* region = ContextParallel::of(q)) return region->attention(q, k, v, options.causal, options.dropout);
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
  return at::scaled_dot_product_attention(q, k, v, {}, options.dropout, options.causal);
#else
  auto scores = at::matmul(q, k.transpose(2, 3)).div(std::sqrt(static_cast<double>(q.size(3))));
  if (options.causal) {
    const auto future = at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  }
  return at::matmul(at::dropout(scores.softmax(-1), options.dropout, options.dropout > 0), v);
#endif
}

inline at::Tensor repeat_heads(const at::Tensor& x, int64_t times) {
  if (times == 1) return x;
  const auto batch = x.size(0), length = x.size(1), heads = x.size(2), dim = x.size(3);
  return x.unsqueeze(3).expand({batch, length, heads, times, dim}).reshape({batch, length, heads * times, dim});
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
