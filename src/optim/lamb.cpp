#include <dtensor/optim/lamb.hpp>

#include "src/optim/norms.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>

namespace dtensor::optim {

namespace {

void check(const char* tag, const LambOptions& o) {
  const auto [b1, b2] = o.betas();
  require(o.lr() >= 0, tag, "got lr {}; expected a number that is not negative", o.lr());
  require(b1 >= 0 && b1 < 1 && b2 >= 0 && b2 < 1, tag, "got betas {} and {}; expected numbers from 0 to below 1", b1, b2);
  require(o.eps() >= 0, tag, "got eps {}; expected a number that is not negative", o.eps());
  require(o.weight_decay() >= 0, tag, "got weight_decay {}; expected a number that is not negative", o.weight_decay());
  require(o.max_norm() > 0, tag, "got max_norm {}; expected a positive number", o.max_norm());
}

std::vector<torch::optim::OptimizerParamGroup> one_group(std::vector<at::Tensor> parameters) {
  return {torch::optim::OptimizerParamGroup(std::move(parameters))};
}

// A parameter with its options, and what a step makes of it.
struct Item {
  at::Tensor x, gradient;
  const LambOptions* options;
  at::Tensor direction;          // r + weight_decay x
  at::Tensor gradient_direction; // c + weight_decay x
};

// Moves the averages on by the item's gradient.
void advance(ParamState& state, Item& item, bool with_gradient_direction) {
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
double trust(const LambOptions& options, double x, double u) { return x > 0 && u > 0 ? std::min(x, options.max_norm()) / u : 1; }

}  // namespace

LambOptions::LambOptions(double lr) : lr_(lr) {}

void LambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_norm);
}

void LambOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Betas, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, max_norm);
}

Lamb::Lamb(std::vector<torch::optim::OptimizerParamGroup> groups, const LambOptions& defaults)
    : Optimizer(std::move(groups), std::make_unique<LambOptions>(defaults)) {
  for (const auto& group : param_groups()) check("Lamb", static_cast<const LambOptions&>(group.options()));
}
Lamb::Lamb(std::vector<at::Tensor> parameters, const LambOptions& defaults) : Lamb(one_group(std::move(parameters)), defaults) {}

void Lamb::update() {
  std::vector<Item> items;
  std::vector<at::Tensor> normed;
  for (const auto& group : param_groups()) {
    for (const auto& x : with_gradients(group)) {
      items.push_back({x, x.grad(), static_cast<const LambOptions*>(&group.options()), {}, {}});
      advance(state_for(x), items.back(), false);
      normed.insert(normed.end(), {x, items.back().direction});
    }
  }
  const auto norms = norms_of(normed);
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& options = *items[i].options;
    items[i].x.add_(items[i].direction, -options.lr() * trust(options, norms[2 * i], norms[2 * i + 1]));
  }
}

Lans::Lans(std::vector<torch::optim::OptimizerParamGroup> groups, const LambOptions& defaults)
    : Optimizer(std::move(groups), std::make_unique<LambOptions>(defaults)) {
  for (const auto& group : param_groups()) check("Lans", static_cast<const LambOptions&>(group.options()));
}
Lans::Lans(std::vector<at::Tensor> parameters, const LambOptions& defaults) : Lans(one_group(std::move(parameters)), defaults) {}

void Lans::update() {
  std::vector<Item> items;
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
    advance(state_for(item.x), item, true);
    normed.insert(normed.end(), {item.x, item.direction, item.gradient_direction});
  }
  const auto norms = norms_of(normed);
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& item = items[i];
    const double b1 = std::get<0>(item.options->betas()), lr = item.options->lr();
    item.x.add_(item.direction, -lr * b1 * trust(*item.options, norms[3 * i], norms[3 * i + 1]));
    item.x.add_(item.gradient_direction, -lr * (1 - b1) * trust(*item.options, norms[3 * i], norms[3 * i + 2]));
  }
}

}  // namespace dtensor::optim
