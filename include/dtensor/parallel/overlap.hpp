// Linear layers that a plan cuts, with the collective beside them: gather and multiply, multiply and reduce. In pieces, the one goes on while
// the other does (as in Wang et al., "Overlap Communication with Dependent Computation via Decomposition", 2023; Chang et al., "FLUX", 2024).
// Plain tensors pass through the layers as they are, so a model that is written with these runs on one device too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dtensor {

// A layer's weight [out, in] and its bias [out], if it has one; or those of a torch::nn::Linear.
struct LinearLayer {
  LinearLayer(at::Tensor of_layer, at::Tensor bias_of_layer) : weight(std::move(of_layer)), bias(std::move(bias_of_layer)) {}
  template <class Linear>
  LinearLayer(const Linear& module) : weight(module->weight), bias(module->bias) {}

  at::Tensor weight, bias;
};

// The outputs [..., out] of layers cut by their outputs (ColwiseParallel) on one input `x` [..., in]: of each, linear(prepare_input(x,
// weight), weight, bias). Communicates as prepare_input() does: where positions are cut an all_gather, in backward a reduce_scatter; where
// they are whole an all_reduce in backward. In pieces inside of OverlapLinear. Differentiable, there once. Throws where the sizes do not fit.
std::vector<at::Tensor> gather_linear(const at::Tensor& x, const std::vector<LinearLayer>& layers);

// The output [..., out] of a layer cut by its inputs (RowwiseParallel), laid out as `like` [..., any]: lay_out_like(linear(x, weight, bias),
// like). Communicates a reduce_scatter where `like` is cut by positions, and an all_gather in backward; else an all_reduce. In pieces inside of
// OverlapLinear. Differentiable, there once. Throws where the sizes do not fit.
at::Tensor linear_reduce(const at::Tensor& x, const LinearLayer& layer, const at::Tensor& like);

// While it lives, in this thread, gather_linear() and linear_reduce() cut the rows of a rank's part into `pieces`, as many collectives, each
// under way while another piece is multiplied; backward too. Where that is possible: weights cut along one mesh dimension and pinned (as
// parallelize_module does), rows cut evenly or whole, and no autocast; elsewhere they do as without. Sums have another order. Pays where a
// collective waits for a network or is carried out by something else than the cores that multiply. Throws for fewer than one piece.
class OverlapLinear {
 public:
  explicit OverlapLinear(int64_t pieces);
  ~OverlapLinear();
  OverlapLinear(const OverlapLinear&) = delete;
  OverlapLinear& operator=(const OverlapLinear&) = delete;

  // Of the innermost in this thread; outside of any 1.
  static int64_t pieces();

 private:
  int64_t before_;
};

}  // namespace dtensor
