// The model of resnest.hpp.
#include "resnest.hpp"

#include <dtensor/nn/split_attention.hpp>

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/pooling.h>

#include <cmath>

namespace zoo {

namespace {

using torch::nn::BatchNorm2d;
using torch::nn::Sequential;

constexpr int64_t kExpansion = 4;  // outputs of a block to its width

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

// A bottleneck. [b, in, h, w] -> [b, 4 * width, h / stride, w / stride], both rounded up.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t in, int64_t width, int64_t stride) : stride_(stride) {
    const auto out = kExpansion * width;
    conv1_ = register_module("conv1", convolution(in, width, 1));
    bn1_ = register_module("bn1", BatchNorm2d(width));
    conv2_ = register_module("conv2", dtensor::nn::SplitAttention(dtensor::nn::SplitAttentionOptions{width, width}));
    conv3_ = register_module("conv3", convolution(width, out, 1));
    bn3_ = register_module("bn3", BatchNorm2d(out));
    if (stride == 1 && in == out) return;
    const auto pool = torch::nn::AvgPool2dOptions(stride).ceil_mode(true).count_include_pad(false);
    downsample_ = register_module("downsample", Sequential(torch::nn::AvgPool2d(pool), convolution(in, out, 1), BatchNorm2d(out)));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    auto y = conv2_(at::relu(bn1_(conv1_(x))));
    if (stride_ > 1) y = at::avg_pool2d(y, 3, stride_, 1);
    return at::relu(bn3_(conv3_(y)) + (downsample_ ? downsample_->forward(x) : x));
  }

 private:
  int64_t stride_;
  torch::nn::Conv2d conv1_{nullptr}, conv3_{nullptr};
  BatchNorm2d bn1_{nullptr}, bn3_{nullptr};
  dtensor::nn::SplitAttention conv2_{nullptr};
  Sequential downsample_{nullptr};
};
TORCH_MODULE(Block);

// As published: N(0, sqrt(2 / n)), n being the outputs that an input reaches (He et al., 2015).
void initialize(torch::nn::Module& model) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    const auto* conv = module->as<torch::nn::Conv2d>();
    if (!conv) continue;
    const auto outputs = conv->weight.size(0) * conv->weight.size(2) * conv->weight.size(3);
    torch::nn::init::normal_(conv->weight, 0, std::sqrt(2.0 / static_cast<double>(outputs)));
  }
}

}  // namespace

ResNeStImpl::ResNeStImpl(const ResNeStOptions& o) : small_images_(o.small_images), in_(2 * o.stem) {
  const auto first = convolution(o.channels, o.stem, 3, o.small_images ? 1 : 2);
  conv1_ = register_module("conv1", Sequential(first, BatchNorm2d(o.stem), torch::nn::ReLU(), convolution(o.stem, o.stem, 3),
                                               BatchNorm2d(o.stem), torch::nn::ReLU(), convolution(o.stem, in_, 3)));
  bn1_ = register_module("bn1", BatchNorm2d(in_));
  layer1_ = register_module("layer1", stage(o.width, o.layers.at(0), 1));
  layer2_ = register_module("layer2", stage(2 * o.width, o.layers.at(1), 2));
  layer3_ = register_module("layer3", stage(4 * o.width, o.layers.at(2), 2));
  layer4_ = register_module("layer4", stage(8 * o.width, o.layers.at(3), 2));
  fc_ = register_module("fc", torch::nn::Linear(in_, o.classes));
  initialize(*this);
}

Sequential ResNeStImpl::stage(int64_t width, int64_t blocks, int64_t stride) {
  Sequential layers;
  for (int64_t i = 0; i < blocks; ++i) {
    layers->push_back(Block(in_, width, i == 0 ? stride : 1));
    in_ = kExpansion * width;
  }
  return layers;
}

torch::Tensor ResNeStImpl::forward(const torch::Tensor& images) {
  auto x = at::relu(bn1_(conv1_->forward(images)));
  if (!small_images_) x = at::max_pool2d(x, 3, 2, 1);
  for (auto layer : {layer1_, layer2_, layer3_, layer4_}) x = layer->forward(x);
  return fc_(x.mean({2, 3}));
}

}  // namespace zoo
