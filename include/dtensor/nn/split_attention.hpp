// Attention over the splits of a convolution's channels (Zhang et al., "ResNeSt: Split-Attention Networks", 2020).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

#include <algorithm>

#pragma GCC visibility push(default)

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

// -- How ------------------------------------------------------------------------------------------------------------------

inline SplitAttentionImpl::SplitAttentionImpl(const SplitAttentionOptions& o) : radix_(o.radix), groups_(o.groups) {
  const auto inner = std::max<int64_t>(o.in * o.radix / o.reduction, 32);
  const auto all = o.out * o.radix;
  const auto convolution = [](int64_t in, int64_t out, int64_t kernel) { return torch::nn::Conv2dOptions(in, out, kernel); };
  conv = register_module("conv",
                         torch::nn::Conv2d(convolution(o.in, all, 3).stride(o.stride).padding(1).groups(o.groups * o.radix).bias(false)));
  bn0 = register_module("bn0", torch::nn::BatchNorm2d(all));
  fc1 = register_module("fc1", torch::nn::Conv2d(convolution(o.out, inner, 1).groups(o.groups)));
  bn1 = register_module("bn1", torch::nn::BatchNorm2d(inner));
  fc2 = register_module("fc2", torch::nn::Conv2d(convolution(inner, all, 1).groups(o.groups)));
}

inline torch::Tensor SplitAttentionImpl::forward(torch::Tensor x) {
  x = at::relu(bn0(conv(x)));
  const auto batch = x.size(0), out = x.size(1) / radix_;
  const auto splits = x.reshape({batch, radix_, out, x.size(2), x.size(3)});
  const auto means = splits.mean({3, 4}).sum(1).reshape({batch, out, 1, 1});
  const auto scores = fc2(at::relu(bn1(fc1(means))));
  // fc2's channels are (group, split, channel of the group), those of the splits (split, group, channel of the group).
  const auto weights = scores.reshape({batch, groups_, radix_, out / groups_}).transpose(1, 2).softmax(1);
  return (splits * weights.reshape({batch, radix_, out, 1, 1})).sum(1);
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
