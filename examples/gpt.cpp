// The model of gpt.hpp.
#include "gpt.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace {

// Causal softmax(q k^T / sqrt(d/h)) v: [b, h, t, d/h] each -> [b, h, t, d/h].
torch::Tensor causal_attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v, double dropout) {
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
  return at::scaled_dot_product_attention(q, k, v, {}, dropout, /*is_causal=*/true);
#else
  const auto t = q.size(2);
  auto future = at::ones({t, t}, q.options().dtype(at::kBool)).triu(1);
  auto scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
  auto weights = at::softmax(scores.masked_fill(future, -std::numeric_limits<double>::infinity()), -1);
  return at::matmul(at::dropout(weights, dropout, dropout > 0), v);
#endif
}

// GPT-2's initialization: N(0, std), biases zero.
void initialize(torch::nn::Linear& linear, double std = 0.02) {
  torch::nn::init::normal_(linear->weight, 0, std);
  if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
}

}  // namespace

GptBlockImpl::GptBlockImpl(const GptOptions& options)
    : heads_(options.heads),
      dropout_(options.dropout),
      norm1_(torch::nn::LayerNormOptions({options.dim})),
      norm2_(torch::nn::LayerNormOptions({options.dim})),
      q_(options.dim, options.dim),
      k_(options.dim, options.dim),
      v_(options.dim, options.dim),
      o_(options.dim, options.dim),
      up_(options.dim, 4 * options.dim),
      down_(4 * options.dim, options.dim) {
  TORCH_CHECK(options.heads > 0 && options.dim % options.heads == 0,
              "gpt: the width must be a multiple of the number of heads; got width ", options.dim, " and ",
              options.heads, " heads");
  register_module("norm1", norm1_);
  register_module("q", q_);
  register_module("k", k_);
  register_module("v", v_);
  register_module("o", o_);
  register_module("norm2", norm2_);
  register_module("up", up_);
  register_module("down", down_);
  for (auto* linear : {&q_, &k_, &v_, &up_}) initialize(*linear);
  // What is added to the residual stream is scaled down, so that depth does not raise its variance (GPT-2, 2.3).
  for (auto* linear : {&o_, &down_}) initialize(*linear, 0.02 / std::sqrt(2.0 * static_cast<double>(options.layers)));
}

torch::Tensor GptBlockImpl::attention(const torch::Tensor& x) {
  const auto b = x.size(0), t = x.size(1), d = x.size(2);
  auto split_heads = [&](const torch::Tensor& y) { return y.view({b, t, heads_, d / heads_}).transpose(1, 2); };
  auto y = causal_attention(split_heads(q_(x)), split_heads(k_(x)), split_heads(v_(x)), is_training() ? dropout_ : 0);
  return o_(y.transpose(1, 2).reshape({b, t, d}));
}

torch::Tensor GptBlockImpl::forward(torch::Tensor x) {
  x = x + at::dropout(attention(norm1_(x)), dropout_, is_training());
  return x + at::dropout(down_(at::gelu(up_(norm2_(x)))), dropout_, is_training());
}

GptImpl::GptImpl(const GptOptions& options)
    : dropout_(options.dropout),
      tokens_(options.vocab, options.dim),
      norm_(torch::nn::LayerNormOptions({options.dim})),
      head_(torch::nn::LinearOptions(options.dim, options.vocab).bias(false)) {
  register_module("tokens", tokens_);
  positions_ = register_parameter("positions", torch::empty({options.max_seq, options.dim}));
  for (int64_t i = 0; i < options.layers; ++i) blocks_->push_back(GptBlock(options));
  register_module("blocks", blocks_);
  register_module("norm", norm_);
  register_module("head", head_);
  torch::nn::init::normal_(tokens_->weight, 0, 0.02);
  torch::nn::init::normal_(positions_, 0, 0.02);
  initialize(head_);
}

torch::Tensor GptImpl::embed(const torch::Tensor& ids) {
  const auto t = ids.size(1);
  TORCH_CHECK(t <= positions_.size(0), "gpt: a sequence of ", t, " is longer than the ", positions_.size(0),
              " positions");
  return at::dropout(tokens_(ids) + positions_.slice(0, 0, t), dropout_, is_training());
}

torch::Tensor GptImpl::block(size_t i, const torch::Tensor& x) { return blocks_[i]->as<GptBlock>()->forward(x); }

torch::Tensor GptImpl::score(const torch::Tensor& x) { return head_(norm_(x)); }

torch::Tensor GptImpl::forward(const torch::Tensor& ids) {
  auto x = embed(ids);
  for (size_t i = 0; i < blocks_->size(); ++i) x = block(i, x);
  return score(x);
}

torch::Tensor gpt_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}
