#include <dtensor/nn/swiglu.hpp>

#include <dtensor/parallel/overlap.hpp>

namespace dtensor::nn {

SwiGLUImpl::SwiGLUImpl(int64_t dim, int64_t hidden) {
  const auto linear = [this](const char* name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  w1 = linear("w1", dim, hidden);
  w2 = linear("w2", hidden, dim);
  w3 = linear("w3", dim, hidden);
}

torch::Tensor SwiGLUImpl::forward(const torch::Tensor& input) {
  const auto gated = gather_linear(input, {w1, w3});
  return linear_reduce(at::silu(gated[0]) * gated[1], w2, input);
}

}  // namespace dtensor::nn
