#include <dtensor/nn/patch_embedding.hpp>

namespace dtensor::nn {

PatchEmbeddingImpl::PatchEmbeddingImpl(int64_t channels, int64_t patch, int64_t dim)
    : proj(register_module("proj", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, dim, patch).stride(patch)))) {}

torch::Tensor PatchEmbeddingImpl::forward(const torch::Tensor& images) { return proj(images).flatten(2).transpose(1, 2); }

}  // namespace dtensor::nn
