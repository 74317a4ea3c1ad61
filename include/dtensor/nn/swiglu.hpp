// The gated feed-forward layer of Llama (Shazeer, "GLU Variants Improve Transformer", 2020).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace dtensor::nn {

class SwiGLUImpl : public torch::nn::Module {
 public:
  SwiGLUImpl(int64_t dim, int64_t hidden);

  // w2(silu(w1(x)) * w3(x)): [..., dim] -> [..., dim].
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};  // dim -> hidden, hidden -> dim, dim -> hidden; without bias
};
TORCH_MODULE(SwiGLU);

}  // namespace dtensor::nn
