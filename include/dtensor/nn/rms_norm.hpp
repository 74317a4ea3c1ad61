// Normalization by the root of the mean square (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace dtensor::nn {

class RMSNormImpl : public torch::nn::Module {
 public:
  explicit RMSNormImpl(int64_t dim, double eps = 1e-5);

  // weight * x / sqrt(mean(x^2) + eps), over the last dim: [..., dim] -> [..., dim] in the dtype of x. x is normalized in float32 when its
  // dtype is shorter. Communicates nothing when a dim other than the last is sharded.
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;  // [dim], ones at first

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

}  // namespace dtensor::nn
