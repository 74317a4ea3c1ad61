#include <dtensor/nn/split_attention.hpp>

#include <algorithm>

namespace dtensor::nn {

SplitAttentionImpl::SplitAttentionImpl(const SplitAttentionOptions& o) : radix_(o.radix), groups_(o.groups) {
  const auto inner = std::max<int64_t>(o.in * o.radix / o.reduction, 32);
  const auto all = o.out * o.radix;
  const auto convolution = [](int64_t in, int64_t out, int64_t kernel) { return torch::nn::Conv2dOptions(in, out, kernel); };
  conv = register_module("conv", torch::nn::Conv2d(
                                     convolution(o.in, all, 3).stride(o.stride).padding(1).groups(o.groups * o.radix).bias(false)));
  bn0 = register_module("bn0", torch::nn::BatchNorm2d(all));
  fc1 = register_module("fc1", torch::nn::Conv2d(convolution(o.out, inner, 1).groups(o.groups)));
  bn1 = register_module("bn1", torch::nn::BatchNorm2d(inner));
  fc2 = register_module("fc2", torch::nn::Conv2d(convolution(inner, all, 1).groups(o.groups)));
}

torch::Tensor SplitAttentionImpl::forward(torch::Tensor x) {
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
