// Attention of some queries to some keys: what a rank computes of the whole.
#pragma once

#include <dtensor/parallel/context/fused_attention.hpp>
#include <dtensor/parallel/context/short_attention.hpp>
#include <dtensor/parallel/context/tiled_attention.hpp>

#include <ATen/ops/zeros_like.h>

#pragma GCC visibility push(default)

namespace dtensor::context {

// q [batch, heads, queries, dim], k and v [batch, key heads, keys, dim], plain and of one dtype; a group of heads shares a key head. What
// the mask hides is not computed, and no more than one tile of scores exists. Sums are float32, or float64 of float64.
//
// libtorch's kernel where it has one and the mask suits it, else our own: one for short sequences in one row, and one for
// all, which scales the sum so far to the new largest score for each tile of keys, as in "FlashAttention" (Dao et al., 2022).
Attended block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call);

// Adds to dq, dk and dv, in the dtype of Attended, what these keys give. Makes those that are undefined.
void add_block_gradients(BlockGradients& into, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OutputGradient& of, const AttentionCall& call);

// -- How ------------------------------------------------------------------------------------------------------------------

inline Attended block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  const detail::Plain plain;
  if (detail::suits_fused(q, k, call)) return detail::fused_attention(q, k, v, call);
  if (detail::suits_short(q, call)) return detail::short_attention(q, k, v, call);
  return detail::tiled_attention(q, k, v, call);
}

inline void add_block_gradients(BlockGradients& into, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const OutputGradient& of, const AttentionCall& call) {
  const detail::Plain plain;
  const bool is_fused = of.out.defined() && detail::suits_fused(q, k, call), is_short = !is_fused && detail::suits_short(q, call);
  if (is_fused) detail::add_fused_gradients(into, q, k, v, of, call);
  const auto make = [&](at::Tensor& gradient, const at::Tensor& like) {
    const auto options = like.options().dtype(sums_of(like));
    if (!gradient.defined()) gradient = is_short ? at::zeros_like(like, options) : at::zeros(like.sizes(), options);
  };
  make(into.dq, q), make(into.dk, k), make(into.dv, v);
  if (is_short) detail::add_short_gradients(into, q, k, v, of, call);
  else if (!is_fused) detail::add_tiled_gradients(into, q, k, v, of, call);
}

}  // namespace dtensor::context

#pragma GCC visibility pop
