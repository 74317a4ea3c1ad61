// Muon: an optimizer for matrices, which makes their momentum orthogonal.
#pragma once

#include <dtensor/optim/optimizer.hpp>

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <tuple>
#include <vector>

namespace dtensor::optim {

// The factor of the learning rate, for a matrix of r rows and c columns.
enum class MuonScale {
  original,   // sqrt(max(1, r / c))
  match_adamw // 0.2 sqrt(max(r, c)): updates as large as AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025, eq. 4)
};

struct MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  using Coefficients = std::tuple<double, double, double>;
  MuonOptions(double lr = 1e-3);
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  TORCH_ARG(Coefficients, coefficients) = {3.4445, -4.7750, 2.0315};
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(int64_t, ns_steps) = 5;
  TORCH_ARG(MuonScale, scale) = MuonScale::original;
  // The dtype in which matrices are sent and made orthogonal. bfloat16 halves what is sent.
  TORCH_ARG(at::ScalarType, dtype) = at::kFloat;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
};

// Roughly the orthogonal matrix nearest to `matrix`, by Newton and Schulz's iteration. Starts with X = matrix / max(|matrix|, eps) and
// computes X = a X + (b A + c A A) X with A = X X^T, `steps` times; the coefficients are those of Jordan et al., "Muon: An optimizer for
// hidden layers in neural networks", 2024. `matrix` is [rows, columns], plain, of any floating-point type; so is the result.
at::Tensor newton_schulz(const at::Tensor& matrix, int64_t steps, const MuonOptions::Coefficients& coefficients, double eps);

// Muon (Jordan et al., 2024), for the matrices of hidden layers. Give embeddings, heads, biases and norms to another optimizer. For each
// matrix x
//
//   m = momentum m + (1-momentum) g,  u = nesterov ? momentum m + (1-momentum) g : m,
//   x = x - lr weight_decay x,  x = x - lr scale newton_schulz(u)
//
// A parameter of more than two dims (a convolution) is seen as the matrix [sizes[0], rest].
//
// One rank of a matrix's mesh makes it orthogonal as a whole; the matrices are divided among the ranks by size. Layouts may be any.
// Communicates two all_to_alls per mesh: the first gathers the shards of all matrices, the second sends the shards of the results. Each
// element is sent to the matrix's owner once. Where the gradients have the bits of one device, so has the result.
//
// State: "momentum", laid out as the parameter. Throws for options out of range, parameters of less than two dims, and sparse gradients.
class Muon : public Optimizer {
 public:
  explicit Muon(std::vector<torch::optim::OptimizerParamGroup> groups, const MuonOptions& defaults = {});
  explicit Muon(std::vector<at::Tensor> parameters, const MuonOptions& defaults = {});

 private:
  void update() override;
};

}  // namespace dtensor::optim
