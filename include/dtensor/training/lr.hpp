// Learning rates as functions of the step, and a scheduler that sets them in an optimizer.
#pragma once

#include <dtensor/base/error.hpp>

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numbers>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

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

  const torch::optim::Optimizer& optimizer() const { return optimizer_; }

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

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kTag = "lr";
inline constexpr const char* kScheduler = "lr::Scheduler";

inline void check_steps(const char* what, int64_t steps) {
  require(steps >= 0, kTag, "got {} {}; expected a number that is not negative", steps, what);
}

inline void check_factor(const char* what, double factor) {
  require(std::isfinite(factor) && factor >= 0, kTag, "got {} {}; expected a finite number that is not negative", what, factor);
}

// How much of `steps` has passed: 0 to 1.
inline double passed(int64_t step, int64_t steps) {
  return steps == 0 ? 1 : std::clamp(static_cast<double>(step) / static_cast<double>(steps), 0.0, 1.0);
}

inline double half_cosine(double from, double to, double t) { return to + (from - to) * 0.5 * (1 + std::cos(std::numbers::pi * t)); }

inline std::vector<Schedule> for_each_group(const torch::optim::Optimizer& optimizer, const Schedule& schedule) {
  return std::vector<Schedule>(optimizer.param_groups().size(), schedule);
}

}  // namespace detail

inline Schedule constant(double factor) {
  detail::check_factor("factor", factor);
  return [=](int64_t) { return factor; };
}

inline Schedule linear(double from, double to, int64_t steps) {
  detail::check_factor("from", from);
  detail::check_factor("to", to);
  detail::check_steps("steps", steps);
  return [=](int64_t step) {
    const double t = detail::passed(step, steps);
    return from * (1 - t) + to * t;
  };
}

inline Schedule warmup(int64_t steps) {
  detail::check_steps("steps", steps);
  return [=](int64_t step) { return detail::passed(step + 1, steps); };
}

inline Schedule cosine(int64_t steps, double last) {
  detail::check_steps("steps", steps);
  detail::check_factor("last", last);
  return [=](int64_t step) { return detail::half_cosine(1, last, detail::passed(step, steps)); };
}

inline Schedule polynomial(int64_t steps, double power, double last) {
  detail::check_steps("steps", steps);
  detail::check_factor("power", power);
  detail::check_factor("last", last);
  return [=](int64_t step) { return last + (1 - last) * std::pow(1 - detail::passed(step, steps), power); };
}

inline Schedule inverse_sqrt(int64_t warmup) {
  require(warmup > 0, detail::kTag, "got {} steps of warm-up; expected at least 1", warmup);
  return [=](int64_t step) {
    const double s = static_cast<double>(step) + 1, w = static_cast<double>(warmup);
    return std::min(s / w, std::sqrt(w / s));
  };
}

inline Schedule warmup_stable_decay(int64_t warmup_steps, int64_t stable, int64_t decay, double last, Decay shape) {
  detail::check_steps("stable steps", stable);
  detail::check_steps("steps of decay", decay);
  detail::check_factor("last", last);
  Schedule down = shape == Decay::linear ? linear(1, last, decay) : cosine(decay, last);
  if (shape == Decay::one_minus_sqrt) down = [=](int64_t step) { return last + (1 - last) * (1 - std::sqrt(detail::passed(step, decay))); };
  return sequence({{warmup(warmup_steps), warmup_steps}, {constant(), stable}, {std::move(down), decay}});
}

inline Schedule one_cycle(int64_t steps, double rise, double div_factor, double final_div_factor) {
  require(steps > 0 && rise >= 0 && rise <= 1, detail::kTag,
          "got a cycle of {} steps that rises for {} of them; expected steps, and 0 to 1", steps, rise);
  require(div_factor > 0 && final_div_factor > 0, detail::kTag, "got div_factor {} and final_div_factor {}; expected positive numbers",
          div_factor, final_div_factor);
  // The top is not at a whole step, and the bottom is the last step's.
  const double top = rise * static_cast<double>(steps) - 1, end = static_cast<double>(steps) - 1;
  const double first = 1 / div_factor, last = first / final_div_factor;
  return [=](int64_t step) {
    const double s = std::min(static_cast<double>(step), end);
    if (s <= top) return detail::half_cosine(first, 1, top > 0 ? s / top : 1);
    return detail::half_cosine(1, last, end > top ? (s - top) / (end - top) : 1);
  };
}

inline Schedule sequence(std::vector<std::pair<Schedule, int64_t>> parts) {
  require(!parts.empty(), detail::kTag, "a sequence needs at least one schedule");
  for (const auto& [schedule, steps] : parts) {
    require(static_cast<bool>(schedule), detail::kTag, "a schedule of the sequence is empty");
    detail::check_steps("steps", steps);
  }
  return [parts = std::move(parts)](int64_t step) {
    size_t i = 0;
    for (; i + 1 < parts.size() && step >= parts[i].second; ++i) step -= parts[i].second;
    return parts[i].first(step);
  };
}

inline Schedule product(Schedule a, Schedule b) {
  require(a && b, detail::kTag, "a factor of a product of schedules is empty");
  return [a = std::move(a), b = std::move(b)](int64_t step) { return a(step) * b(step); };
}

inline Scheduler::Scheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : Scheduler(optimizer, detail::for_each_group(optimizer, schedule)) {}

inline Scheduler::Scheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules)
    : optimizer_(optimizer), schedules_(std::move(schedules)), base_(rates()) {
  require(schedules_.size() == base_.size(), detail::kScheduler, "got {} schedules; expected one for each of the {} groups of parameters",
          schedules_.size(), base_.size());
  for (const auto& schedule : schedules_) require(static_cast<bool>(schedule), detail::kScheduler, "a schedule is empty");
  set_step(0);
}

inline void Scheduler::set_step(int64_t step) {
  require(step >= 0, detail::kScheduler, "got step {}; expected a number that is not negative", step);
  require(optimizer_.param_groups().size() == base_.size(), detail::kScheduler,
          "the optimizer has {} groups now, and had {}; hint: make the scheduler after them", optimizer_.param_groups().size(),
          base_.size());
  step_ = step;
  for (size_t i = 0; i < base_.size(); ++i) optimizer_.param_groups()[i].options().set_lr(base_[i] * schedules_[i](step));
}

inline std::vector<double> Scheduler::rates() const {
  std::vector<double> rates;
  for (const auto& group : optimizer_.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

}  // namespace dtensor::lr

#pragma GCC visibility pop
