// Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): keys and values of all heads are made of one short vector a position, and
// so may be the queries. Positions are turned into a part of each head only, which the keys of all heads share.
#pragma once

#include <dtensor/nn/attention.hpp>
#include <dtensor/nn/rms_norm.hpp>
#include <dtensor/nn/rotary_embedding.hpp>
#include <dtensor/parallel/marks.hpp>
#include <dtensor/parallel/overlap.hpp>

#include <ATen/ops/cat.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

struct LatentAttentionOptions {
  int64_t dim = 0, heads = 0;
  int64_t q_rank = 0, kv_rank = 0;                    // of the short vectors; q_rank 0: queries are made of the input
  int64_t nope_dim = 0, rope_dim = 0, value_dim = 0;  // of a head: keys without and with positions, values
  double eps = 1e-6;                                  // of the norms of the short vectors
  double scale = 1;  // of the scores, besides 1 / sqrt(nope_dim + rope_dim): yarn_attention_scale of stretched positions
};

class LatentAttentionImpl : public torch::nn::Module {
 public:
  // Throws c10::Error for sizes below 1 and heads whose values are longer than their keys.
  explicit LatentAttentionImpl(const LatentAttentionOptions& options);

  // Causal: x [batch, length, dim] -> [batch, length, dim]. `table` is the rotary table for `length` positions and rope_dim. Where
  // automatic_plan cuts it, it cuts heads: wq, wq_b and wkv_b by outputs, wo by inputs. Then it communicates as gather_linear and
  // linear_reduce of these layers do: of the way to the heads the short vectors only.
  torch::Tensor forward(const torch::Tensor& x, const RotaryTable& table);

  torch::nn::Linear wq{nullptr};                   // dim -> heads (nope_dim + rope_dim), where q_rank is 0; all are without bias
  torch::nn::Linear wq_a{nullptr}, wq_b{nullptr};  // or dim -> q_rank -> heads (nope_dim + rope_dim)
  torch::nn::Linear wkv_a{nullptr};                // dim -> kv_rank + rope_dim
  torch::nn::Linear wkv_b{nullptr};                // kv_rank -> heads (nope_dim + value_dim)
  torch::nn::Linear wo{nullptr};                   // heads value_dim -> dim
  RMSNorm q_norm{nullptr}, kv_norm{nullptr};       // of the short vectors

 private:
  torch::Tensor queries(const torch::Tensor& x, const RotaryTable& table);  // [batch, length, heads, nope_dim + rope_dim]
  LatentAttentionOptions options_;
};
TORCH_MODULE(LatentAttention);

// -- How ------------------------------------------------------------------------------------------------------------------

inline LatentAttentionImpl::LatentAttentionImpl(const LatentAttentionOptions& options) : options_(options) {
  const auto& o = options_;
  TORCH_CHECK(o.dim > 0 && o.heads > 0 && o.q_rank >= 0 && o.kv_rank > 0 && o.nope_dim > 0 && o.rope_dim > 0 && o.value_dim > 0,
              "latent attention: sizes are 1 or more; got dim ", o.dim, ", ", o.heads, " heads, ranks ", o.q_rank, " and ", o.kv_rank,
              ", heads of ", o.nope_dim, ", ", o.rope_dim, " and ", o.value_dim);
  TORCH_CHECK(o.value_dim <= o.nope_dim + o.rope_dim, "latent attention: values are no longer than keys; got ", o.value_dim, " and ",
              o.nope_dim + o.rope_dim);
  const auto linear = [this](const char* name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  const auto of_queries = o.heads * (o.nope_dim + o.rope_dim);
  if (o.q_rank > 0) {
    wq_a = linear("wq_a", o.dim, o.q_rank);
    q_norm = register_module("q_norm", RMSNorm(o.q_rank, o.eps));
    wq_b = linear("wq_b", o.q_rank, of_queries);
  } else {
    wq = linear("wq", o.dim, of_queries);
  }
  wkv_a = linear("wkv_a", o.dim, o.kv_rank + o.rope_dim);
  kv_norm = register_module("kv_norm", RMSNorm(o.kv_rank, o.eps));
  wkv_b = linear("wkv_b", o.kv_rank, o.heads * (o.nope_dim + o.value_dim));
  wo = linear("wo", o.heads * o.value_dim, o.dim);
}

inline torch::Tensor LatentAttentionImpl::queries(const torch::Tensor& x, const RotaryTable& table) {
  const auto& o = options_;
  const auto made = wq ? gather_linear(x, {wq})[0] : gather_linear(q_norm(wq_a(x)), {wq_b})[0];
  const auto q = made.reshape({x.size(0), x.size(1), o.heads, o.nope_dim + o.rope_dim});
  const auto turned = at::cat({q.narrow(-1, 0, o.nope_dim), apply_rotary(q.narrow(-1, o.nope_dim, o.rope_dim), table)}, -1);
  return o.scale == 1 ? turned : turned * o.scale;
}

inline torch::Tensor LatentAttentionImpl::forward(const torch::Tensor& x, const RotaryTable& table) {
  const auto& o = options_;
  const auto batch = x.size(0), length = x.size(1);
  const auto q = queries(x, table);
  const auto latent = wkv_a(x);
  const auto made = gather_linear(kv_norm(latent.narrow(-1, 0, o.kv_rank)), {wkv_b})[0];
  const auto kv = made.reshape({batch, length, o.heads, o.nope_dim + o.value_dim});
  const auto placed = apply_rotary(latent.narrow(-1, o.kv_rank, o.rope_dim).unsqueeze(2), table).squeeze(2);
  const auto shared = prepare_input(placed, wkv_b->weight).unsqueeze(2).expand({batch, length, o.heads, o.rope_dim});
  const auto k = at::cat({kv.narrow(-1, 0, o.nope_dim), shared}, -1);
  const auto v = kv.narrow(-1, o.nope_dim, o.value_dim);
  const auto y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {/*causal=*/true});
  return linear_reduce(y.transpose(1, 2).reshape({batch, length, o.heads * o.value_dim}), wo, x);
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
