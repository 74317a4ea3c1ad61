// Images as sequences of patches (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

class PatchEmbeddingImpl : public torch::nn::Module {
 public:
  PatchEmbeddingImpl(int64_t channels, int64_t patch, int64_t dim);

  // A linear map of each patch, row by row: images [batch, channels, height, width] -> [batch, height / patch * width / patch, dim]. Rows
  // and columns beyond the last whole patch are not read.
  torch::Tensor forward(const torch::Tensor& images);

  torch::nn::Conv2d proj{nullptr};
};
TORCH_MODULE(PatchEmbedding);

// -- How ------------------------------------------------------------------------------------------------------------------

inline PatchEmbeddingImpl::PatchEmbeddingImpl(int64_t channels, int64_t patch, int64_t dim)
    : proj(register_module("proj", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, dim, patch).stride(patch)))) {}

inline torch::Tensor PatchEmbeddingImpl::forward(const torch::Tensor& images) { return proj(images).flatten(2).transpose(1, 2); }

}  // namespace dtensor::nn

#pragma GCC visibility pop
