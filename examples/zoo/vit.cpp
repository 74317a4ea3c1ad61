// The model of vit.hpp.
#include "vit.hpp"

#include <dtensor/nn/attention.hpp>
#include <dtensor/parallel/overlap.hpp>

#include <torch/nn/init.h>

#include <cmath>

namespace zoo {

namespace {

// As published: Glorot and Bengio's uniform distribution, of each of the `fused` layers in one; biases N(0, 1e-6) in the MLPs, else zero.
torch::nn::Linear linear(int64_t in, int64_t out, double bias_std = 0, int64_t fused = 1) {
  torch::nn::Linear layer(in, out);
  const double bound = std::sqrt(6.0 / static_cast<double>(in + out / fused));
  torch::nn::init::uniform_(layer->weight, -bound, bound);
  torch::nn::init::zeros_(layer->bias);
  if (bias_std > 0) torch::nn::init::normal_(layer->bias, 0, bias_std);
  return layer;
}

torch::nn::LayerNorm norm(int64_t dim) { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim}).eps(1e-6)); }

}  // namespace

VitAttentionImpl::VitAttentionImpl(const VitOptions& options)
    : qkv_(register_module("qkv", linear(options.dim, 3 * options.dim, 0, 3))),
      proj_(register_module("proj", linear(options.dim, options.dim))),
      heads_(options.heads) {
  TORCH_CHECK(options.heads > 0 && options.dim % options.heads == 0, "vit: the width must be a multiple of the heads; got ", options.dim,
              " and ", options.heads);
}

torch::Tensor VitAttentionImpl::forward(const torch::Tensor& x) {
  const auto b = x.size(0), n = x.size(1), d = x.size(2);
  const auto fused = dtensor::gather_linear(x, {qkv_})[0];
  const auto qkv = fused.reshape({b, n, 3, heads_, d / heads_}).transpose(1, 3).unbind(2);  // [b, heads, n, d / heads] each
  const auto y = dtensor::nn::attention(qkv[0], qkv[1], qkv[2]);
  return dtensor::linear_reduce(y.transpose(1, 2).reshape({b, n, d}), proj_, x);
}

VitMlpImpl::VitMlpImpl(const VitOptions& options)
    : fc1_(register_module("fc1", linear(options.dim, options.hidden, 1e-6))),
      fc2_(register_module("fc2", linear(options.hidden, options.dim, 1e-6))) {}

torch::Tensor VitMlpImpl::forward(const torch::Tensor& x) {
  return dtensor::linear_reduce(at::gelu(dtensor::gather_linear(x, {fc1_})[0]), fc2_, x);
}

VitBlockImpl::VitBlockImpl(const VitOptions& options)
    : norm1_(register_module("norm1", norm(options.dim))),
      norm2_(register_module("norm2", norm(options.dim))),
      attn_(register_module("attn", VitAttention(options))),
      mlp_(register_module("mlp", VitMlp(options))) {}

torch::Tensor VitBlockImpl::forward(torch::Tensor x) {
  x = x + attn_(norm1_(x));
  return x + mlp_(norm2_(x));
}

VitImpl::VitImpl(const VitOptions& options)
    : patch_embed_(register_module("patch_embed", dtensor::nn::PatchEmbedding(options.channels, options.patch, options.dim))) {
  const auto rows = options.image / options.patch;
  cls_token_ = register_parameter("cls_token", torch::zeros({1, 1, options.dim}));
  pos_embed_ = register_parameter("pos_embed", torch::empty({1, rows * rows + 1, options.dim}));
  for (int64_t i = 0; i < options.layers; ++i) blocks_->push_back(VitBlock(options));
  register_module("blocks", blocks_);
  norm_ = register_module("norm", norm(options.dim));
  head_ = register_module("head", linear(options.dim, options.classes));
  const auto inputs = static_cast<double>(options.channels * options.patch * options.patch);
  torch::nn::init::normal_(patch_embed_->proj->weight, 0, std::sqrt(1 / inputs));
  torch::nn::init::zeros_(patch_embed_->proj->bias);
  torch::nn::init::normal_(pos_embed_, 0, 0.02);
  torch::nn::init::zeros_(head_->weight);
}

torch::Tensor VitImpl::forward(const torch::Tensor& images) {
  const auto patches = patch_embed_(images);
  TORCH_CHECK(patches.size(1) + 1 == pos_embed_.size(1), "vit: images ", images.sizes(), " have ", patches.size(1), " patches; expected ",
              pos_embed_.size(1) - 1);
  auto x = at::cat({cls_token_.expand({images.size(0), -1, -1}), patches}, 1) + pos_embed_;
  for (const auto& block : *blocks_) x = block->as<VitBlock>()->forward(x);
  return head_(norm_(x).select(1, 0));
}

}  // namespace zoo
