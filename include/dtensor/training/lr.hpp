// Learning rates as functions of the step, and a scheduler that sets them in an optimizer.
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

// A schedule gives the factor of the base rate at step 0, 1, 2, ... Any function will do.
using Schedule = std::function<double(int64_t step)>;

// The functions below throw for a negative number of steps, and for factors that are negative or not finite. A schedule with a number of
// steps stays at its last value afterwards.

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

// Rises from 1/div_factor within rise*steps steps, then falls to 1/(div_factor*final_div_factor), both by half a cosine, as
// torch.optim.lr_scheduler.OneCycleLR does (Smith and Topin, "Super-Convergence", 2018). The base rate is the largest rate.
Schedule one_cycle(int64_t steps, double rise = 0.3, double div_factor = 25, double final_div_factor = 1e4);

// One schedule after the other, each for its number of steps, counted from 0. The last one goes on for ever, whatever its number.
Schedule sequence(std::vector<std::pair<Schedule, int64_t>> parts);

// The product of two schedules.
Schedule product(Schedule a, Schedule b);

// Sets the rates of an optimizer's groups to base rate times schedule(step). Base rates are those that the groups have at construction,
// which sets the rates of step 0. Call step() after each optimizer step. The optimizer has to outlive the scheduler. Every rank computes
// the same; communicates nothing.
class Scheduler {
 public:
  // One schedule for all groups, or one for each group. Throws for another number of schedules, and for an empty schedule.
  Scheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  Scheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  void step() { set_step(step_ + 1); }

  // Goes to a step, to resume training there. Throws for a negative step.
  void set_step(int64_t step);
  int64_t current_step() const { return step_; }

  // The present rates of the groups.
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
