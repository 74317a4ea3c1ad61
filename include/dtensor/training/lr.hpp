// Learning rates as functions of the step, and what sets them in an optimizer.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace dtensor::lr {

// The factor of the base rate at step 0, 1, 2, ... Any function will do.
using Schedule = std::function<double(int64_t step)>;

// The functions below throw for negative numbers of steps and factors that are not finite or negative. Those with a number of steps stay
// at their last value afterwards.

Schedule constant(double factor = 1);

// From `from` at step 0 to `to` at step `steps`, evenly.
Schedule linear(double from, double to, int64_t steps);

// 1/steps, 2/steps, ..., 1 at step steps-1: the first step is already one.
Schedule warmup(int64_t steps);

// Half a cosine from 1 at step 0 to `last` at step `steps` (Loshchilov and Hutter, "SGDR", 2017, without restarts).
Schedule cosine(int64_t steps, double last = 0);

// last + (1 - last) (1 - step/steps)^power.
Schedule polynomial(int64_t steps, double power, double last = 0);

// sqrt(warmup / (step + 1)) after a warm-up of `warmup` steps (Vaswani et al., "Attention Is All You Need", 2017, eq. 3, with 1 as its
// largest value).
Schedule inverse_sqrt(int64_t warmup);

// How warmup_stable_decay ends: linear, or 1 - sqrt(t) (Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
// Durations", 2024).
enum class Decay { linear, cosine, one_minus_sqrt };

// Warm-up, then 1 for `stable` steps, then down to `last` within `decay` (WSD; Hu et al., "MiniCPM", 2024).
Schedule warmup_stable_decay(int64_t warmup, int64_t stable, int64_t decay, double last = 0, Decay shape = Decay::linear);

// Up from 1/div_factor within rise*steps and down to 1/(div_factor*final_div_factor), both by half a cosine, as
// torch.optim.lr_scheduler.OneCycleLR (Smith and Topin, "Super-Convergence", 2018). The base rate is the largest one.
Schedule one_cycle(int64_t steps, double rise = 0.3, double div_factor = 25, double final_div_factor = 1e4);

// One after the other: each schedule for its number of steps, counted from 0; the last one for ever, whatever its number.
Schedule sequence(std::vector<std::pair<Schedule, int64_t>> parts);

// The product of two schedules.
Schedule product(Schedule a, Schedule b);

// Sets the rates of any optimizer's groups: base rate times schedule(step). The base rates are those that the groups have at construction,
// which sets the rates of step 0; call step() after each optimizer step. The optimizer has to outlive it. Every rank computes the same;
// communicates nothing.
class Scheduler {
 public:
  // One schedule for all groups, or one for each. Throws for another number of schedules, and an empty one.
  Scheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  Scheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  void step() { set_step(step_ + 1); }

  // Goes to a step, from which training is resumed. Throws for a negative one.
  void set_step(int64_t step);
  int64_t current_step() const { return step_; }

  // The groups' present rates.
  std::vector<double> rates() const;

  // The step and the base rates.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<Schedule> schedules_;
  std::vector<double> base_;
  int64_t step_ = 0;
};

}  // namespace dtensor::lr
