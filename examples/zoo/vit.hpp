// The Vision Transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020), in plain libtorch, for one device. Its modules are
// named as in timm's checkpoints. Shapes: b batch, n patches and one, d width.
#pragma once

#include "model.hpp"

#include <dtensor/nn/patch_embedding.hpp>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace zoo {

struct VitOptions {
  int64_t image = 224, channels = 3, patch = 16;  // images are square
  int64_t classes = 1000;
  int64_t layers = 12, dim = 768, heads = 12, hidden = 3072;
};

class VitAttentionImpl : public torch::nn::Module {
 public:
  explicit VitAttentionImpl(const VitOptions& options);
  torch::Tensor forward(const torch::Tensor& x);  // [b, n, d] -> [b, n, d]

 private:
  torch::nn::Linear qkv_{nullptr}, proj_{nullptr};
  int64_t heads_;
};
TORCH_MODULE(VitAttention);

class VitMlpImpl : public torch::nn::Module {
 public:
  explicit VitMlpImpl(const VitOptions& options);
  torch::Tensor forward(const torch::Tensor& x);  // [b, n, d] -> [b, n, d]

 private:
  torch::nn::Linear fc1_{nullptr}, fc2_{nullptr};
};
TORCH_MODULE(VitMlp);

class VitBlockImpl : public torch::nn::Module {
 public:
  explicit VitBlockImpl(const VitOptions& options);
  torch::Tensor forward(torch::Tensor x);  // [b, n, d] -> [b, n, d]

 private:
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  VitAttention attn_{nullptr};
  VitMlp mlp_{nullptr};
};
TORCH_MODULE(VitBlock);

class VitImpl : public Model {
 public:
  explicit VitImpl(const VitOptions& options);
  torch::Tensor forward(const torch::Tensor& images) override;

 private:
  dtensor::nn::PatchEmbedding patch_embed_{nullptr};
  torch::Tensor cls_token_, pos_embed_;  // [1, 1, d], [1, n, d]
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Vit);

}  // namespace zoo
