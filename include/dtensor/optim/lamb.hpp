// Optimizers for large batches (LAMB, LANS): Adam's direction, with a step in proportion to the norm of the parameter.
#pragma once

#include <dtensor/optim/optimizer.hpp>

#include <torch/arg.h>

#include <tuple>
#include <vector>

namespace dtensor::optim {

struct LambOptions : torch::optim::OptimizerCloneableOptions<LambOptions> {
  using Betas = std::tuple<double, double>;
  LambOptions(double lr = 1e-3);
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0.01;
  // The largest norm of a parameter that counts, phi(z) = min(z, max_norm) in the papers.
  TORCH_ARG(double, max_norm) = 10;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
};

// LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, algorithm 2). For each parameter x
//   m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,  r = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps),  u = r + weight_decay x,
//   x = x - lr phi(|x|) / |u| u          (where a norm is 0: x - lr u)
// The norms are those of whole parameters, whatever their layouts. A step communicates 16 bytes per parameter, in one all_reduce.
// State: "exp_avg" and "exp_avg_sq", laid out as the parameter. Throws for options out of range, and sparse gradients.
class Lamb : public Optimizer {
 public:
  explicit Lamb(std::vector<torch::optim::OptimizerParamGroup> groups, const LambOptions& defaults = {});
  explicit Lamb(std::vector<at::Tensor> parameters, const LambOptions& defaults = {});

 private:
  void update() override;
};

// LANS (Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes", 2020, algorithm 2): LAMB with gradients of
// norm 1 for each parameter, and Nesterov's momentum. With g' = g / |g| in place of g, and c = g' / (sqrt(v / (1-b2^t)) + eps),
//   x = x - lr phi(|x|) (b1 (r + weight_decay x) / |r + weight_decay x| + (1-b1) (c + weight_decay x) / |c + weight_decay x|)
// A step communicates 8 and then 24 bytes per parameter, in two all_reduces. State and errors are those of Lamb.
class Lans : public Optimizer {
 public:
  explicit Lans(std::vector<torch::optim::OptimizerParamGroup> groups, const LambOptions& defaults = {});
  explicit Lans(std::vector<at::Tensor> parameters, const LambOptions& defaults = {});

 private:
  void update() override;
};

}  // namespace dtensor::optim
