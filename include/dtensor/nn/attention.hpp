// Scaled dot-product attention (Vaswani et al., "Attention Is All You Need", 2017).
#pragma once

#include <dtensor/tensor/attention_region.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
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

// softmax(q k^T / sqrt(dim)) v, for each head by itself: q, k and v [batch, heads, length, dim] -> [batch, heads, length, dim]. Values may
// be shorter than keys, and so is the result; what takes one length only (libtorch's kernel, methods for cut positions) gets zeros after
// them. Calls libtorch's kernel where there is one. Communicates nothing when batch and heads are sharded. In a dt::ContextParallel, over
// positions that are cut, its method computes this; k and v may then have fewer heads, which groups share. Where a decoder runs the model,
// it computes this from the keys and values that it keeps.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options = {});

// How often keys and values of `key_heads` are to be repeated for the heads of q [batch, heads, length, dim]: 1 where groups of heads may
// share them.
int64_t repeats_of_keys(const at::Tensor& q, int64_t key_heads);

// Those of x [batch, length, ...] that a head is to score: all but where a decoder wants fewer. Write head(scored_rows(x)) in a model.
at::Tensor scored_rows(const at::Tensor& x);

// Repeats every head `times` times in a row: [batch, length, heads, dim] -> [batch, length, heads * times, dim]. Grouped-query attention
// does this to keys and values.
at::Tensor repeat_heads(const at::Tensor& x, int64_t times);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Whether libtorch's kernel computes it; a hook takes values of any length.
inline bool is_of_kernel() {
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
  return !World::current().local<AttentionHook>().compute;
#else
  return false;
#endif
}

}  // namespace detail

inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options) {
  if (auto* decoding = Decoding::current()) return decoding->attention({q, k, v, {}, options.dropout, options.causal});
  auto* region = AttentionRegion::of(q);
  if (const auto missing = q.size(3) - v.size(3); missing > 0 && (region || detail::is_of_kernel()))
    return attention(q, k, at::constant_pad_nd(v, {0, missing}), options).narrow(3, 0, v.size(3));
  if (region) return region->attention(q, k, v, options.causal, options.dropout);
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
  return at::scaled_dot_product_attention(q, k, v, {}, options.dropout, options.causal);  // which asks the hook
#else
  if (const auto& hook = World::current().local<AttentionHook>(); hook.compute) {
    if (const auto y = hook.compute({q, k, v, {}, options.dropout, options.causal})) return *y;
  }
  auto scores = at::matmul(q, k.transpose(2, 3)).div(std::sqrt(static_cast<double>(q.size(3))));
  if (options.causal) {
    const auto future = at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  }
  return at::matmul(at::dropout(scores.softmax(-1), options.dropout, options.dropout > 0), v);
#endif
}

inline int64_t repeats_of_keys(const at::Tensor& q, int64_t key_heads) {
  const auto* context = AttentionRegion::of(q);
  auto* decoding = Decoding::current();
  if (q.size(1) == key_heads) return 1;
  const bool shared = decoding ? decoding->shares_heads(q, key_heads) : context && context->may_share_heads(q, key_heads);
  return shared ? 1 : q.size(1) / key_heads;
}

inline at::Tensor scored_rows(const at::Tensor& x) {
  auto* decoding = Decoding::current();
  return decoding ? decoding->scored_rows(x) : x;
}

inline at::Tensor repeat_heads(const at::Tensor& x, int64_t times) {
  if (times == 1) return x;
  const auto batch = x.size(0), length = x.size(1), heads = x.size(2), dim = x.size(3);
  return x.unsqueeze(3).expand({batch, length, heads, times, dim}).reshape({batch, length, heads * times, dim});
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
