// Sharded linear layers together with their collective: gather and multiply, multiply and reduce. Cut into pieces, the collective of one
// piece overlaps with the product of another (as in Wang et al., "Overlap Communication with Dependent Computation via Decomposition",
// 2023; Chang et al., "FLUX", 2024). Plain tensors go through the plain layers, so a model written with these functions runs on one device
// too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// The weight [out, in] of a layer, and its bias [out] if it has one. A torch::nn::Linear converts to it.
struct LinearLayer {
  LinearLayer(at::Tensor of_layer, at::Tensor bias_of_layer) : weight(std::move(of_layer)), bias(std::move(bias_of_layer)) {}
  template <class Linear>
  LinearLayer(const Linear& module) : weight(module->weight), bias(module->bias) {}

  at::Tensor weight, bias;
};

// The outputs [..., out] of layers sharded by outputs (ColwiseParallel) for one input `x` [..., in]. Each output is linear(prepare_input(x,
// weight), weight, bias). Communicates as prepare_input() does: an all_gather, and a reduce_scatter in backward, where positions are
// sharded; an all_reduce in backward where they are whole. Differentiable; inside OverlapLinear it works in pieces, and is differentiable
// once. Throws if the sizes do not fit.
std::vector<at::Tensor> gather_linear(const at::Tensor& x, const std::vector<LinearLayer>& layers);

// The output [..., out] of a layer sharded by inputs (RowwiseParallel), laid out like `like` [..., any]: lay_out_like(linear(x, weight,
// bias), like). Communicates a reduce_scatter, and an all_gather in backward, where `like` is sharded by positions; otherwise an
// all_reduce. Differentiable; inside OverlapLinear it works in pieces, and is differentiable once. Throws if the sizes do not fit.
at::Tensor linear_reduce(const at::Tensor& x, const LinearLayer& layer, const at::Tensor& like);

// While it lives, gather_linear() and linear_reduce() of this thread cut the rows of a rank's shard into `pieces`, in forward and backward.
// Each piece has a collective of its own, which overlaps with the product of another piece. This needs weights that are sharded along one
// mesh dimension and pinned (as parallelize_module does), rows that are sharded evenly or whole, and no autocast; otherwise the functions
// work as without it. Sums are added in another order. It pays where a collective waits for a network, or runs on something else than the
// cores that multiply. Throws for fewer than one piece.
class OverlapLinear {
 public:
  explicit OverlapLinear(int64_t pieces);
  ~OverlapLinear();
  OverlapLinear(const OverlapLinear&) = delete;
  OverlapLinear& operator=(const OverlapLinear&) = delete;

  // The number of pieces of this thread's innermost OverlapLinear; 1 outside of any.
  static int64_t pieces();

 private:
  int64_t before_;
};

}  // namespace dtensor

#pragma GCC visibility pop
