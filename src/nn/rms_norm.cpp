#include <dtensor/nn/rms_norm.hpp>

namespace dtensor::nn {

RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : weight(register_parameter("weight", torch::ones({dim}))), eps_(eps) {}

torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) {
  const auto y = x.to(at::promote_types(x.scalar_type(), at::kFloat));
  return (y * (y.square().mean({-1}, /*keepdim=*/true) + eps_).rsqrt()).to(x.scalar_type()) * weight;
}

}  // namespace dtensor::nn
