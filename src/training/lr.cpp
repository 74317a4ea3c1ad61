#include <dtensor/training/lr.hpp>

#include <dtensor/base/error.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>

namespace dtensor::lr {

namespace {

constexpr const char* kTag = "lr";

void check_steps(const char* what, int64_t steps) {
  require(steps >= 0, kTag, "got {} {}; expected a number that is not negative", steps, what);
}

void check_factor(const char* what, double factor) {
  require(std::isfinite(factor) && factor >= 0, kTag, "got {} {}; expected a finite number that is not negative", what, factor);
}

// How much of `steps` has passed: 0 to 1.
double passed(int64_t step, int64_t steps) {
  return steps == 0 ? 1 : std::clamp(static_cast<double>(step) / static_cast<double>(steps), 0.0, 1.0);
}

double half_cosine(double from, double to, double t) { return to + (from - to) * 0.5 * (1 + std::cos(std::numbers::pi * t)); }

}  // namespace

Schedule constant(double factor) {
  check_factor("factor", factor);
  return [=](int64_t) { return factor; };
}

Schedule linear(double from, double to, int64_t steps) {
  check_factor("from", from);
  check_factor("to", to);
  check_steps("steps", steps);
  return [=](int64_t step) {
    const double t = passed(step, steps);
    return from * (1 - t) + to * t;
  };
}

Schedule warmup(int64_t steps) {
  check_steps("steps", steps);
  return [=](int64_t step) { return passed(step + 1, steps); };
}

Schedule cosine(int64_t steps, double last) {
  check_steps("steps", steps);
  check_factor("last", last);
  return [=](int64_t step) { return half_cosine(1, last, passed(step, steps)); };
}

Schedule polynomial(int64_t steps, double power, double last) {
  check_steps("steps", steps);
  check_factor("power", power);
  check_factor("last", last);
  return [=](int64_t step) { return last + (1 - last) * std::pow(1 - passed(step, steps), power); };
}

Schedule inverse_sqrt(int64_t warmup) {
  require(warmup > 0, kTag, "got {} steps of warm-up; expected at least 1", warmup);
  return [=](int64_t step) {
    const double s = static_cast<double>(step) + 1, w = static_cast<double>(warmup);
    return std::min(s / w, std::sqrt(w / s));
  };
}

Schedule warmup_stable_decay(int64_t warmup_steps, int64_t stable, int64_t decay, double last, Decay shape) {
  check_steps("stable steps", stable);
  check_steps("steps of decay", decay);
  check_factor("last", last);
  Schedule down = shape == Decay::linear ? linear(1, last, decay) : cosine(decay, last);
  if (shape == Decay::one_minus_sqrt) down = [=](int64_t step) { return last + (1 - last) * (1 - std::sqrt(passed(step, decay))); };
  return sequence({{warmup(warmup_steps), warmup_steps}, {constant(), stable}, {std::move(down), decay}});
}

Schedule one_cycle(int64_t steps, double rise, double div_factor, double final_div_factor) {
  require(steps > 0 && rise >= 0 && rise <= 1, kTag, "got a cycle of {} steps that rises for {} of them; expected steps, and 0 to 1", steps,
          rise);
  require(div_factor > 0 && final_div_factor > 0, kTag, "got div_factor {} and final_div_factor {}; expected positive numbers", div_factor,
          final_div_factor);
  // The top is not at a whole step, and the bottom is the last step's.
  const double top = rise * static_cast<double>(steps) - 1, end = static_cast<double>(steps) - 1;
  const double first = 1 / div_factor, last = first / final_div_factor;
  return [=](int64_t step) {
    const double s = std::min(static_cast<double>(step), end);
    if (s <= top) return half_cosine(first, 1, top > 0 ? s / top : 1);
    return half_cosine(1, last, end > top ? (s - top) / (end - top) : 1);
  };
}

Schedule sequence(std::vector<std::pair<Schedule, int64_t>> parts) {
  require(!parts.empty(), kTag, "a sequence needs at least one schedule");
  for (const auto& [schedule, steps] : parts) {
    require(static_cast<bool>(schedule), kTag, "a schedule of the sequence is empty");
    check_steps("steps", steps);
  }
  return [parts = std::move(parts)](int64_t step) {
    size_t i = 0;
    for (; i + 1 < parts.size() && step >= parts[i].second; ++i) step -= parts[i].second;
    return parts[i].first(step);
  };
}

Schedule product(Schedule a, Schedule b) {
  require(a && b, kTag, "a factor of a product of schedules is empty");
  return [a = std::move(a), b = std::move(b)](int64_t step) { return a(step) * b(step); };
}

}  // namespace dtensor::lr
