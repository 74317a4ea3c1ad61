#include <dtensor/nn/swiglu.hpp>

#include <dtensor/parallel/marks.hpp>

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
  const auto x = prepare_input(input, w1->weight);
  return lay_out_like(w2(at::silu(w1(x)) * w3(x)), input);
}

}  // namespace dtensor::nn
