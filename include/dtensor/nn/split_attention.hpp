// Attention over the splits of a convolution's channels (Zhang et al., "ResNeSt: Split-Attention Networks", 2020).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

namespace dtensor::nn {

struct SplitAttentionOptions {
  int64_t in = 0, out = 0;  // channels
  int64_t radix = 2;        // splits
  int64_t groups = 1;       // cardinality
  int64_t stride = 1;
  int64_t reduction = 4;
};

// A 3x3 convolution into `radix` times `out` channels. Each output channel is a weighted sum of one channel from each split. The weights
// are a softmax over the splits, computed from the means of the channels.
class SplitAttentionImpl : public torch::nn::Module {
 public:
  explicit SplitAttentionImpl(const SplitAttentionOptions& options);

  // [batch, in, height, width] -> [batch, out, ceil(height / stride), ceil(width / stride)].
  torch::Tensor forward(torch::Tensor x);

  torch::nn::Conv2d conv{nullptr}, fc1{nullptr}, fc2{nullptr};
  torch::nn::BatchNorm2d bn0{nullptr}, bn1{nullptr};

 private:
  int64_t radix_, groups_;
};
TORCH_MODULE(SplitAttention);

}  // namespace dtensor::nn
