// The gated feed-forward layer of Llama (Shazeer, "GLU Variants Improve Transformer", 2020).
#pragma once

#include <dtensor/parallel/overlap.hpp>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

class SwiGLUImpl : public torch::nn::Module {
 public:
  SwiGLUImpl(int64_t dim, int64_t hidden);

  // w2(silu(w1(x)) * w3(x)): [..., dim] -> [..., dim].
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};  // dim -> hidden, hidden -> dim, dim -> hidden; without bias
};
TORCH_MODULE(SwiGLU);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {
// silu(gate) * up, of tensors of one shape. Of float32 and float64 on the CPU by the operator dtensor::swiglu (src/nn/swiglu.cpp), in one
// pass.
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up);
}  // namespace detail

inline SwiGLUImpl::SwiGLUImpl(int64_t dim, int64_t hidden) {
  const auto linear = [this](const char* name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  w1 = linear("w1", dim, hidden);
  w2 = linear("w2", hidden, dim);
  w3 = linear("w3", dim, hidden);
}

inline torch::Tensor SwiGLUImpl::forward(const torch::Tensor& input) {
  const auto gated = gather_linear(input, {w1, w3});
  return linear_reduce(detail::gated(gated[0], gated[1]), w2, input);
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
