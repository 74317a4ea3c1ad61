// The model of gpt2.hpp.
#include "gpt2.hpp"

#include <dtensor/nn/attention.hpp>
#include <dtensor/nn/position_rows.hpp>
#include <dtensor/parallel/marks.hpp>
#include <dtensor/parallel/overlap.hpp>

#include <torch/nn/init.h>

#include <cmath>

namespace zoo {

namespace {

// GPT-2's initialization: N(0, 0.02), less for what is added to the residual stream, so that depth does not raise its variance (2.3).
torch::nn::Linear linear(int64_t in, int64_t out, double std = 0.02) {
  torch::nn::Linear layer(in, out);
  torch::nn::init::normal_(layer->weight, 0, std);
  torch::nn::init::zeros_(layer->bias);
  return layer;
}

double residual_std(const Gpt2Options& options) { return 0.02 / std::sqrt(2.0 * static_cast<double>(options.layers)); }

torch::nn::LayerNorm norm(int64_t dim) { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})); }

}  // namespace

Gpt2AttentionImpl::Gpt2AttentionImpl(const Gpt2Options& options)
    : c_attn(register_module("c_attn", linear(options.dim, 3 * options.dim))),
      c_proj(register_module("c_proj", linear(options.dim, options.dim, residual_std(options)))),
      dropout(options.dropout),
      heads_(options.heads) {
  TORCH_CHECK(options.heads > 0 && options.dim % options.heads == 0, "gpt2: the width must be a multiple of the heads; got ", options.dim,
              " and ", options.heads);
}

torch::Tensor Gpt2AttentionImpl::forward(const torch::Tensor& x) {
  const auto b = x.size(0), t = x.size(1), d = x.size(2);
  const auto fused = dtensor::gather_linear(x, {c_attn})[0];
  const auto qkv = fused.reshape({b, t, 3, heads_, d / heads_}).transpose(1, 3).unbind(2);  // [b, heads, t, d / heads] each
  const auto y = dtensor::nn::attention(qkv[0], qkv[1], qkv[2], {/*causal=*/true, is_training() ? dropout : 0});
  return dtensor::linear_reduce(y.transpose(1, 2).reshape({b, t, d}), c_proj, x);
}

Gpt2MlpImpl::Gpt2MlpImpl(const Gpt2Options& options)
    : c_fc(register_module("c_fc", linear(options.dim, 4 * options.dim))),
      c_proj(register_module("c_proj", linear(4 * options.dim, options.dim, residual_std(options)))) {}

torch::Tensor Gpt2MlpImpl::forward(const torch::Tensor& x) {
  return dtensor::linear_reduce(at::gelu(dtensor::gather_linear(x, {c_fc})[0], "tanh"), c_proj, x);
}

Gpt2BlockImpl::Gpt2BlockImpl(const Gpt2Options& options)
    : ln_1_(register_module("ln_1", norm(options.dim))),
      ln_2_(register_module("ln_2", norm(options.dim))),
      attn_(register_module("attn", Gpt2Attention(options))),
      mlp_(register_module("mlp", Gpt2Mlp(options))),
      dropout_(options.dropout) {}

torch::Tensor Gpt2BlockImpl::forward(torch::Tensor x) {
  x = x + at::dropout(attn_(ln_1_(x)), dropout_, is_training());
  return x + at::dropout(mlp_(ln_2_(x)), dropout_, is_training());
}

Gpt2Impl::Gpt2Impl(const Gpt2Options& options)
    : wte(register_module("wte", torch::nn::Embedding(options.vocabulary, options.dim))),
      wpe(register_module("wpe", torch::nn::Embedding(options.positions, options.dim))),
      dropout_(options.dropout) {
  torch::nn::init::normal_(wte->weight, 0, 0.02);
  torch::nn::init::normal_(wpe->weight, 0, 0.01);
  for (int64_t i = 0; i < options.layers; ++i) h_->push_back(Gpt2Block(options));
  register_module("h", h_);
  ln_f_ = register_module("ln_f", norm(options.dim));
}

void Gpt2BlockImpl::set_dropout(double dropout) { dropout_ = attn_->dropout = dropout; }

torch::Tensor Gpt2Impl::embed(const torch::Tensor& ids) {
  const auto places = dtensor::nn::position_rows(wpe->weight, ids.size(1));
  return at::dropout(dtensor::lay_out_like(wte(ids), ids) + places, dropout_, is_training());
}

torch::Tensor Gpt2Impl::forward(const torch::Tensor& ids) {
  auto x = embed(ids);
  for (const auto& block : *h_) x = block->as<Gpt2Block>()->forward(x);
  return at::linear(ln_f_(dtensor::nn::scored_rows(x)), wte->weight);
}

std::vector<dtensor::Piece> Gpt2Impl::pieces() {
  std::vector<dtensor::Piece> all{dtensor::piece("wte|wpe", [this](const torch::Tensor& ids) { return embed(ids); })};
  for (size_t i = 0; i < h_->size(); ++i) {
    const auto block = h_->ptr<Gpt2BlockImpl>(i);
    all.push_back(dtensor::piece("h." + std::to_string(i), [block](const torch::Tensor& x) { return block->forward(x); }));
  }
  all.push_back(dtensor::piece("ln_f|wte", [this](const torch::Tensor& x) { return at::linear(ln_f_(x), wte->weight); }));
  return all;
}

void Gpt2Impl::set_dropout(double dropout) {
  dropout_ = dropout;
  for (const auto& block : *h_) block->as<Gpt2Block>()->set_dropout(dropout);
}

}  // namespace zoo
