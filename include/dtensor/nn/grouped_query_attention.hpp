// Causal self-attention in which groups of query heads share a head of keys and values (Ainslie et al., "GQA", 2023), with rotary
// positions.
#pragma once

#include <dtensor/nn/attention.hpp>
#include <dtensor/nn/rms_norm.hpp>
#include <dtensor/nn/rotary_embedding.hpp>
#include <dtensor/parallel/overlap.hpp>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

struct GroupedQueryAttentionOptions {
  int64_t dim = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;  // 0: dim / heads
  double dropout = 0;    // of the attention weights, in training
  // Each head of queries, and of keys, is normalized before its positions are turned in (Qwen3), with this added to the mean of squares.
  // 0: none is.
  double norm_eps = 0;
};

class GroupedQueryAttentionImpl : public torch::nn::Module {
 public:
  // Throws c10::Error when heads is no multiple of kv_heads or, where head_dim is 0, dim is no multiple of heads.
  explicit GroupedQueryAttentionImpl(const GroupedQueryAttentionOptions& options);

  // x [batch, length, dim] -> [batch, length, dim]. `table` is the rotary table for `length` positions and head_dim.
  torch::Tensor forward(const torch::Tensor& x, const RotaryTable& table);

  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};  // without bias
  RMSNorm q_norm{nullptr}, k_norm{nullptr};                              // of head_dim; empty without norm_eps

 private:
  GroupedQueryAttentionOptions options_;
};
TORCH_MODULE(GroupedQueryAttention);

// -- How ------------------------------------------------------------------------------------------------------------------

inline GroupedQueryAttentionImpl::GroupedQueryAttentionImpl(const GroupedQueryAttentionOptions& options) : options_(options) {
  auto& o = options_;
  TORCH_CHECK(o.heads > 0 && o.kv_heads > 0 && o.heads % o.kv_heads == 0,
              "grouped-query attention: the heads must be a multiple of those of keys and values; got ", o.heads, " and ", o.kv_heads);
  TORCH_CHECK(o.head_dim > 0 || o.dim % o.heads == 0, "grouped-query attention: the width must be a multiple of the heads; got ", o.dim,
              " and ", o.heads);
  if (o.head_dim == 0) o.head_dim = o.dim / o.heads;
  const auto linear = [this](const char* name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  wq = linear("wq", o.dim, o.heads * o.head_dim);
  wk = linear("wk", o.dim, o.kv_heads * o.head_dim);
  wv = linear("wv", o.dim, o.kv_heads * o.head_dim);
  wo = linear("wo", o.heads * o.head_dim, o.dim);
  if (o.norm_eps == 0) return;
  q_norm = register_module("q_norm", RMSNorm(o.head_dim, o.norm_eps));
  k_norm = register_module("k_norm", RMSNorm(o.head_dim, o.norm_eps));
}

inline torch::Tensor GroupedQueryAttentionImpl::forward(const torch::Tensor& input, const RotaryTable& table) {
  const auto projected = gather_linear(input, {wq, wk, wv});
  const auto batch = input.size(0), length = input.size(1);
  const auto split_heads = [&](const torch::Tensor& y, int64_t heads) { return y.reshape({batch, length, heads, options_.head_dim}); };
  const auto turned = [&](const torch::Tensor& y, int64_t heads, RMSNorm& norm) {
    const auto own = split_heads(y, heads);
    return apply_rotary(norm ? norm(own) : own, table);
  };
  const auto q = turned(projected[0], options_.heads, q_norm).transpose(1, 2);
  const AttentionOptions options{/*causal=*/true, is_training() ? options_.dropout : 0};
  const auto repeats = repeats_of_keys(q, options_.kv_heads);
  const auto k = repeat_heads(turned(projected[1], options_.kv_heads, k_norm), repeats);
  const auto v = repeat_heads(split_heads(projected[2], options_.kv_heads), repeats);
  const auto y = attention(q, k.transpose(1, 2), v.transpose(1, 2), options);
  return linear_reduce(y.transpose(1, 2).reshape({batch, length, options_.heads * options_.head_dim}), wo, input);
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
