// Loss scaling for training in half precision.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

namespace torch::optim {
class Optimizer;
}
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
  void unscale_(torch::optim::Optimizer& optimizer);

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

}  // namespace dtensor
