#include <dtensor/training/grad_scaler.hpp>

#include <dtensor/tensor/spread.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/ivalue.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>

namespace dtensor {

namespace {

constexpr const char* kTag = "GradScaler";

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

// [1] float: 1 if an element of this rank's shards is infinite or NaN, else 0.
at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const std::vector<size_t>& members) {
  std::vector<at::Tensor> found{at::zeros({}, at::TensorOptions(at::kFloat).device(gradients[0].device()))};
  for (const auto i : members) {
    const auto part = detail::plain_local(gradients[i]);
    if (part.numel() > 0) found.push_back(at::linalg_vector_norm(part, INFINITY).isfinite().logical_not().to(at::kFloat));
  }
  return at::stack(found).max().reshape({1});
}

bool all_finite(const std::vector<at::Tensor>& gradients) {
  NoSpmd plain;
  bool finite = true;
  for (const auto& spread : detail::spread_of(gradients, detail::Among::all_ranks)) {
    auto found = found_inf(gradients, spread.members);
    if (spread.group) found = spread.group->all_reduce(found, ReduceOp::max).get();
    finite &= found.item<float>() == 0;
  }
  return finite;
}

}  // namespace

GradScaler::GradScaler(const Options& options) : options_(options), scale_(options.init_scale) {
  require(std::isfinite(scale_) && scale_ > 0, kTag, "got init_scale {}; expected a positive number", scale_);
  require(options.growth_factor > 1, kTag, "got growth_factor {}; expected more than 1", options.growth_factor);
  require(options.backoff_factor > 0 && options.backoff_factor < 1, kTag, "got backoff_factor {}; expected a number between 0 and 1",
          options.backoff_factor);
  require(options.growth_interval > 0, kTag, "got growth_interval {}; expected a positive number", options.growth_interval);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return options_.enabled ? loss * scale_ : loss; }

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) const {
  std::vector<at::Tensor> scaled;
  for (const auto& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  const auto it = seen_.find(&optimizer);
  require(it == seen_.end(), kTag, "the optimizer has {} already since the last update(); hint: unscale_() comes once, before step()",
          it != seen_.end() && it->second.stepped ? "stepped" : "been unscaled");
  at::NoGradGuard no_grad;
  const auto gradients = detail::gradients_of(kTag, parameters_of(optimizer));
  require(!gradients.empty(), kTag, "no parameter of the optimizer has a gradient; hint: call backward() of the scaled loss first");
  for (const auto& gradient : gradients) gradient.mul_(1 / scale_);
  seen_[&optimizer].found_inf = !all_finite(gradients);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return optimizer.step(), true;
  if (!seen_.count(&optimizer)) unscale_(optimizer);
  auto& seen = seen_.at(&optimizer);
  require(!seen.stepped, kTag, "the optimizer has stepped already since the last update()");
  seen.stepped = true;
  if (!seen.found_inf) optimizer.step();
  return !seen.found_inf;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  require(!seen_.empty(), kTag, "update() without a gradient since the last one; hint: call step(optimizer) first");
  const bool found_inf = std::ranges::any_of(seen_, [](const auto& seen) { return seen.second.found_inf; });
  growth_tracker_ = found_inf ? 0 : growth_tracker_ + 1;
  if (found_inf) scale_ *= options_.backoff_factor;
  if (growth_tracker_ == options_.growth_interval) {
    const double grown = scale_ * options_.growth_factor;
    if (std::isfinite(static_cast<float>(grown))) scale_ = grown;
    growth_tracker_ = 0;
  }
  seen_.clear();
}

void GradScaler::update(double new_scale) {
  require(std::isfinite(new_scale) && new_scale > 0, kTag, "got a new scale of {}; expected a positive number", new_scale);
  scale_ = new_scale;
  seen_.clear();
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", c10::IValue(scale_));
  archive.write("growth_factor", c10::IValue(options_.growth_factor));
  archive.write("backoff_factor", c10::IValue(options_.backoff_factor));
  archive.write("growth_interval", c10::IValue(options_.growth_interval));
  archive.write("growth_tracker", c10::IValue(growth_tracker_));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* name) {
    c10::IValue value;
    archive.read(name, value);
    return value;
  };
  auto options = options_;
  options.init_scale = read("scale").toDouble();
  options.growth_factor = read("growth_factor").toDouble();
  options.backoff_factor = read("backoff_factor").toDouble();
  options.growth_interval = read("growth_interval").toInt();
  GradScaler loaded(options);  // which checks
  loaded.options_.init_scale = options_.init_scale;
  loaded.growth_tracker_ = read("growth_tracker").toInt();
  *this = std::move(loaded);
}

}  // namespace dtensor
