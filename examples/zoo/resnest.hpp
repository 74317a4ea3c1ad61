// ResNeSt (Zhang et al., "ResNeSt: Split-Attention Networks", 2020), in plain libtorch, for one device. Its modules are named as in the
// published checkpoints.
#pragma once

#include "model.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <vector>

namespace zoo {

struct ResNeStOptions {
  int64_t channels = 3, classes = 1000;
  std::vector<int64_t> layers = {3, 4, 6, 3};  // blocks in each stage
  int64_t width = 64;                          // channels in the blocks of the first stage
  int64_t stem = 32;                           // channels of the first two convolutions
  bool small_images = false;                   // the stem keeps height and width, where it would divide them by 4
};

class ResNeStImpl : public Model {
 public:
  explicit ResNeStImpl(const ResNeStOptions& options);
  torch::Tensor forward(const torch::Tensor& images) override;

 private:
  torch::nn::Sequential stage(int64_t width, int64_t blocks, int64_t stride);

  bool small_images_;
  int64_t in_;  // channels that the next stage gets
  torch::nn::Sequential conv1_{nullptr}, layer1_{nullptr}, layer2_{nullptr}, layer3_{nullptr}, layer4_{nullptr};
  torch::nn::BatchNorm2d bn1_{nullptr};
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(ResNeSt);

}  // namespace zoo
