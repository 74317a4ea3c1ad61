// Optimizers for large batches (LAMB, LANS): Adam's direction, with a step in proportion to the norm of the parameter.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/optim/norms.hpp>
#include <dtensor/optim/optimizer.hpp>

#include <ATen/ops/zeros_like.h>
#include <torch/arg.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

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

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline void check_lamb(const char* tag, const LambOptions& o) {
  const auto [b1, b2] = o.betas();
  require(o.lr() >= 0, tag, "got lr {}; expected a number that is not negative", o.lr());
  require(b1 >= 0 && b1 < 1 && b2 >= 0 && b2 < 1, tag, "got betas {} and {}; expected numbers from 0 to below 1", b1, b2);
  require(o.eps() >= 0, tag, "got eps {}; expected a number that is not negative", o.eps());
  require(o.weight_decay() >= 0, tag, "got weight_decay {}; expected a number that is not negative", o.weight_decay());
  require(o.max_norm() > 0, tag, "got max_norm {}; expected a positive number", o.max_norm());
}

inline std::vector<torch::optim::OptimizerParamGroup> one_group(std::vector<at::Tensor> parameters) {
  return {torch::optim::OptimizerParamGroup(std::move(parameters))};
}

// A parameter with its options, and what a step makes of it.
struct LambItem {
  at::Tensor x, gradient;
  const LambOptions* options;
  at::Tensor direction;           // r + weight_decay x
  at::Tensor gradient_direction;  // c + weight_decay x
};

// Moves the averages on by the item's gradient.
inline void advance(ParamState& state, LambItem& item, bool with_gradient_direction) {
  const auto [b1, b2] = item.options->betas();
  auto& m = state.tensors["exp_avg"];
  auto& v = state.tensors["exp_avg_sq"];
  if (!m.defined()) m = at::zeros_like(item.x);
  if (!v.defined()) v = at::zeros_like(item.x);
  const auto t = static_cast<double>(++state.step);
  m.mul_(b1).add_(item.gradient, 1 - b1);
  v.mul_(b2).addcmul_(item.gradient, item.gradient, 1 - b2);
  const auto root = v.div(1 - std::pow(b2, t)).sqrt_().add_(item.options->eps());
  item.direction = m.div(1 - std::pow(b1, t)).div_(root).add_(item.x, item.options->weight_decay());
  if (with_gradient_direction) item.gradient_direction = item.gradient.div(root).add_(item.x, item.options->weight_decay());
}

// phi(|x|) / |u|, 1 where either is 0.
inline double trust(const LambOptions& options, double x, double u) { return x > 0 && u > 0 ? std::min(x, options.max_norm()) / u : 1; }

}  // namespace detail

inline LambOptions::LambOptions(double lr) : lr_(lr) {}

inline void LambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_norm);
}

inline void LambOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Betas, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, max_norm);
}

inline Lamb::Lamb(std::vector<torch::optim::OptimizerParamGroup> groups, const LambOptions& defaults)
    : Optimizer(std::move(groups), std::make_unique<LambOptions>(defaults)) {
  for (const auto& group : param_groups()) detail::check_lamb("Lamb", static_cast<const LambOptions&>(group.options()));
}
inline Lamb::Lamb(std::vector<at::Tensor> parameters, const LambOptions& defaults)
    : Lamb(detail::one_group(std::move(parameters)), defaults) {}

inline void Lamb::update() {
  std::vector<detail::LambItem> items;
  std::vector<at::Tensor> normed;
  for (const auto& group : param_groups()) {
    for (const auto& x : with_gradients(group)) {
      items.push_back({x, x.grad(), static_cast<const LambOptions*>(&group.options()), {}, {}});
      detail::advance(state_for(x), items.back(), false);
      normed.insert(normed.end(), {x, items.back().direction});
    }
  }
  const auto norms = norms_of(normed);
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& options = *items[i].options;
    items[i].x.add_(items[i].direction, -options.lr() * detail::trust(options, norms[2 * i], norms[2 * i + 1]));
  }
}

inline Lans::Lans(std::vector<torch::optim::OptimizerParamGroup> groups, const LambOptions& defaults)
    : Optimizer(std::move(groups), std::make_unique<LambOptions>(defaults)) {
  for (const auto& group : param_groups()) detail::check_lamb("Lans", static_cast<const LambOptions&>(group.options()));
}
inline Lans::Lans(std::vector<at::Tensor> parameters, const LambOptions& defaults)
    : Lans(detail::one_group(std::move(parameters)), defaults) {}

inline void Lans::update() {
  std::vector<detail::LambItem> items;
  std::vector<at::Tensor> normed;
  for (const auto& group : param_groups()) {
    for (const auto& x : with_gradients(group)) {
      items.push_back({x, x.grad(), static_cast<const LambOptions*>(&group.options()), {}, {}});
      normed.push_back(x.grad());
    }
  }
  const auto gradient_norms = norms_of(normed);
  normed.clear();
  for (size_t i = 0; i < items.size(); ++i) {
    auto& item = items[i];
    item.gradient = gradient_norms[i] > 0 ? item.gradient.div(gradient_norms[i]) : item.gradient;
    detail::advance(state_for(item.x), item, true);
    normed.insert(normed.end(), {item.x, item.direction, item.gradient_direction});
  }
  const auto norms = norms_of(normed);
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& item = items[i];
    const double b1 = std::get<0>(item.options->betas()), lr = item.options->lr();
    item.x.add_(item.direction, -lr * b1 * detail::trust(*item.options, norms[3 * i], norms[3 * i + 1]));
    item.x.add_(item.gradient_direction, -lr * (1 - b1) * detail::trust(*item.options, norms[3 * i], norms[3 * i + 2]));
  }
}

}  // namespace dtensor::optim

#pragma GCC visibility pop
