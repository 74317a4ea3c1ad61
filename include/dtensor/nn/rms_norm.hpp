// Normalization by the root of the mean square (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

class RMSNormImpl : public torch::nn::Module {
 public:
  explicit RMSNormImpl(int64_t dim, double eps = 1e-5);

  // weight * x / sqrt(mean(x^2) + eps), over the last dim: [..., dim] -> [..., dim] in the dtype of x. x is normalized in float32 when its
  // dtype is shorter. Communicates nothing when a dim other than the last is sharded. Throws c10::Error for a last dim of another size and
  // for x of integers.
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;  // [dim], ones at first

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Whether the operator dtensor::rms_norm (src/nn/rms_norm.cpp) computes it: on the CPU, in one pass over x, where x and weight have one
// dtype and the last dim of x is whole.
bool has_kernel(const at::Tensor& x, const at::Tensor& weight);
at::Tensor normalized(const at::Tensor& x, const at::Tensor& weight, double eps);

}  // namespace detail

inline RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : weight(register_parameter("weight", torch::ones({dim}))), eps_(eps) {}

inline torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == weight.numel() && x.is_floating_point(), "RMSNorm: got x ", x.sizes(), " of ", x.scalar_type(),
              "; expected floating [..., ", weight.numel(), "]");
  if (detail::has_kernel(x, weight)) return detail::normalized(x, weight, eps_);
  const auto y = x.to(at::promote_types(x.scalar_type(), at::kFloat));
  return (y * (y.square().mean({-1}, /*keepdim=*/true) + eps_).rsqrt()).to(x.scalar_type()) * weight;
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
