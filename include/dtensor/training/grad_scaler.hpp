// Loss scaling for training in half precision.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/spread.hpp>
#include <dtensor/training/parameters_of.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <vector>

#pragma GCC visibility push(default)

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace dtensor {

// Scales the loss, because small gradients vanish in half precision and those of a larger loss do not. The scale grows as long as gradients
// are finite. Where they are not, the step is skipped and the scale shrinks (Micikevicius et al., "Mixed Precision Training", 2018, section
// 3.2). It is used as torch.cuda.amp.GradScaler:
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                        // only where gradients are looked at, as by clip_grad_norm_
//   scaler.step(optimizer);
//   scaler.update();
//
// All ranks take the same decision: one all_reduce of 4 bytes per optimizer and step tells all of them whether any rank found a gradient
// that is not finite.
class GradScaler {
 public:
  struct Options {
    double init_scale = 65536;
    double growth_factor = 2;
    double backoff_factor = 0.5;
    int64_t growth_interval = 2000;  // finite steps between two growths
    bool enabled = true;             // false: everything is passed on as it is
  };

  GradScaler() : GradScaler(Options()) {}
  // Throws unless init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1 and growth_interval > 0.
  explicit GradScaler(const Options& options);

  // The scaled loss, or losses.
  at::Tensor scale(const at::Tensor& loss) const;
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses) const;

  // Divides the gradients of the optimizer's parameters by the scale, in place, and finds out whether all are finite. Reduces Partial
  // gradients first. Communicates one all_reduce, over the ranks of the parameters' meshes (where one mesh holds the others; else one for
  // each mesh). Throws when it is called twice between two updates, when no parameter has a gradient, and for gradients on several devices.
  //
  // `stages`: the ranks of a pipeline, mesh["pp"], whose optimizers have other parameters and make the same decision. One all_reduce more.
  void unscale_(torch::optim::Optimizer& optimizer, const std::optional<DeviceMesh>& stages = std::nullopt);

  // Calls unscale_() if that was not done, then makes the optimizer's step if the gradients are finite. Returns whether it made a step. At
  // most once between two updates.
  bool step(torch::optim::Optimizer& optimizer);

  // Ends the iteration. The scale shrinks if a gradient was not finite, and grows after growth_interval iterations with finite ones. Throws
  // when no optimizer was unscaled or stepped since the last update.
  void update();
  // Sets the scale instead.
  void update(double new_scale);

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  int64_t growth_tracker() const { return growth_tracker_; }  // finite iterations since the scale last changed
  const Options& options() const { return options_; }

  // The scale, the factors and the tracker.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Seen {
    bool found_inf = false;
    bool stepped = false;
  };

  Options options_;
  double scale_;
  int64_t growth_tracker_ = 0;
  std::map<const torch::optim::Optimizer*, Seen> seen_;  // since the last update
};

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kGradScaler = "GradScaler";

// [1] float: 1 if an element of this rank's shards is infinite or NaN, else 0.
inline at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const std::vector<size_t>& members) {
  std::vector<at::Tensor> found{at::zeros({}, at::TensorOptions(at::kFloat).device(gradients[0].device()))};
  for (const auto i : members) {
    const auto part = dtensor::detail::plain_local(gradients[i]);
    if (part.numel() > 0) found.push_back(at::linalg_vector_norm(part, INFINITY).isfinite().logical_not().to(at::kFloat));
  }
  return at::stack(found).max().reshape({1});
}

inline bool all_finite(const std::vector<at::Tensor>& gradients) {
  NoSpmd plain;
  bool finite = true;
  for (const auto& spread : spread_of(gradients, Among::all_ranks)) {
    auto found = found_inf(gradients, spread.members);
    if (spread.group) found = spread.group->all_reduce(found, ReduceOp::max).get();
    finite &= found.item<float>() == 0;
  }
  return finite;
}

}  // namespace detail

inline GradScaler::GradScaler(const Options& options) : options_(options), scale_(options.init_scale) {
  require(std::isfinite(scale_) && scale_ > 0, detail::kGradScaler, "got init_scale {}; expected a positive number", scale_);
  require(options.growth_factor > 1, detail::kGradScaler, "got growth_factor {}; expected more than 1", options.growth_factor);
  require(options.backoff_factor > 0 && options.backoff_factor < 1, detail::kGradScaler,
          "got backoff_factor {}; expected a number between 0 and 1", options.backoff_factor);
  require(options.growth_interval > 0, detail::kGradScaler, "got growth_interval {}; expected a positive number", options.growth_interval);
}

inline at::Tensor GradScaler::scale(const at::Tensor& loss) const { return options_.enabled ? loss.mul(scale_) : loss; }

inline std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) const {
  std::vector<at::Tensor> scaled;
  for (const auto& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

inline void GradScaler::unscale_(torch::optim::Optimizer& optimizer, const std::optional<DeviceMesh>& stages) {
  if (!options_.enabled) return;
  const auto it = seen_.find(&optimizer);
  require(it == seen_.end(), detail::kGradScaler,
          "the optimizer has {} already since the last update(); hint: unscale_() comes once, before step()",
          it != seen_.end() && it->second.stepped ? "stepped" : "been unscaled");
  at::NoGradGuard no_grad;
  const auto gradients = detail::gradients_of(detail::kGradScaler, detail::parameters_of(optimizer));
  require(!gradients.empty(), detail::kGradScaler,
          "no parameter of the optimizer has a gradient; hint: call backward() of the scaled loss first");
  for (const auto& gradient : gradients) gradient.mul_(1 / scale_);
  bool finite = detail::all_finite(gradients);
  for (int64_t dim = 0; stages && dim < stages->ndim(); ++dim) {
    const NoSpmd plain;
    const auto found = at::full({1}, finite ? 0 : 1, at::TensorOptions(at::kFloat).device(gradients[0].device()));
    finite = stages->communicator(dim).all_reduce(found, ReduceOp::max).get().item<float>() == 0;
  }
  seen_[&optimizer].found_inf = !finite;
}

inline bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return optimizer.step(), true;
  if (!seen_.count(&optimizer)) unscale_(optimizer);
  auto& seen = seen_.at(&optimizer);
  require(!seen.stepped, detail::kGradScaler, "the optimizer has stepped already since the last update()");
  seen.stepped = true;
  if (!seen.found_inf) optimizer.step();
  return !seen.found_inf;
}

inline void GradScaler::update() {
  if (!options_.enabled) return;
  require(!seen_.empty(), detail::kGradScaler, "update() without a gradient since the last one; hint: call step(optimizer) first");
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

inline void GradScaler::update(double new_scale) {
  require(std::isfinite(new_scale) && new_scale > 0, detail::kGradScaler, "got a new scale of {}; expected a positive number", new_scale);
  scale_ = new_scale;
  seen_.clear();
}

}  // namespace dtensor

#pragma GCC visibility pop
