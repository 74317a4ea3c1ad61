// Rewards that are changed, and groups that are left out, before advantages are computed.
#pragma once

#include <dtensor/rl/advantages/groups.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct OverlongOptions {
  int64_t longest = 20480;  // the longest answer that there may be
  int64_t buffer = 4096;    // its last tokens, within which the penalty grows
  double penalty = 1;
};

// DAPO's soft punishment of length (arXiv 2503.14476), to be added to scores: 0 up to longest - buffer tokens, then falling evenly to
// -penalty at `longest`, and -penalty beyond it (verl goes on falling). `lengths` [...] of any dtype; the result has `dtype`. Throws for a
// buffer that is not from 1 to `longest`, and a negative penalty.
at::Tensor overlong_penalty(const at::Tensor& lengths, const OverlongOptions& options, at::ScalarType dtype = at::kFloat);

// Dynamic sampling (DAPO): which answers belong to a group whose scores are not all equal; the others have no advantage. bool [batch], of
// `scores` and `groups` (int64) [batch]. An answer alone in its group has no signal, and is kept only if `keep_alone` (as verl does). Whole
// batches, as in advantages/groups.hpp: every rank decides the same. Throws for other shapes and for scores that are NaN or infinite.
at::Tensor groups_with_signal(const at::Tensor& scores, const at::Tensor& groups, bool keep_alone = false);

// The share of groups whose scores are all equal, and which have more than one answer; of all these. 0 without any.
double zero_variance_fraction(const at::Tensor& scores, const at::Tensor& groups);

// FAPO (arXiv 2510.22543): 1 for a right answer, -1 for a wrong one, and `penalty` less for one that is right by flawed reasoning. `right`
// and `flawed` [batch], not 0 where true; flawed does not matter where the answer is wrong. Communicates nothing.
at::Tensor fapo_scores(const at::Tensor& right, const at::Tensor& flawed, double penalty = 1, at::ScalarType dtype = at::kFloat);

// What FAPO's generative reward model gets for its verdict on a solution of `steps` steps (as its authors' code in verl-recipe has it).
// `verdict` and `truth` are the first wrong step, from 0, or -1 for none; any other verdict scores -1. Right about there being none: 1.
// Right about there being one: 1 - |verdict - truth| / steps. Else -1. Throws for a truth that is no step.
double fapo_verdict_score(int64_t verdict, int64_t truth, int64_t steps);

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor overlong_penalty(const at::Tensor& lengths, const OverlongOptions& options, at::ScalarType dtype) {
  require(options.buffer > 0 && options.buffer <= options.longest && options.penalty >= 0, "rl::overlong_penalty",
          "got a buffer of {} of {} tokens and a penalty of {}; expected 1 to all of them, and 0 or more", options.buffer, options.longest,
          options.penalty);
  const auto beyond = lengths.to(dtype).sub(static_cast<double>(options.longest - options.buffer)).div(static_cast<double>(options.buffer));
  return beyond.clamp(0, 1).mul(-options.penalty);
}

namespace detail {

inline at::Tensor differ_from_first(const at::Tensor& scores, const Groups& groups) {
  // Exact: of equal scores every one equals any other of its group.
  auto any = at::zeros(groups.sizes.sizes(), scores.options());
  any = any.scatter(0, groups.index, scores);
  return groups.sums(scores.ne(groups.of_each(any)).to(at::kDouble)).gt(0);
}

template <class F>
auto with_groups(const char* tag, const at::Tensor& scores, const at::Tensor& ids, F f) {
  const at::NoGradGuard no_grad;
  require(scores.defined() && scores.dim() == 1, tag, "got {} for the scores; expected [batch]", shape_of(scores));
  check_alike(tag, "the groups", ids, "the scores", scores);
  check_ids(tag, "groups", ids);
  const auto all = whole(scores), all_ids = whole(ids);
  const NoSpmd plain;
  check_finite(tag, "scores", all);
  return f(all.to(at::kDouble), groups_of(all_ids));
}

}  // namespace detail

inline at::Tensor groups_with_signal(const at::Tensor& scores, const at::Tensor& groups, bool keep_alone) {
  return detail::with_groups("rl::groups_with_signal", scores, groups, [&](const at::Tensor& all, const detail::Groups& g) {
    const auto kept = g.of_each(detail::differ_from_first(all, g));
    return detail::beside(keep_alone ? kept.logical_or(g.alone) : kept, scores);
  });
}

inline double zero_variance_fraction(const at::Tensor& scores, const at::Tensor& groups) {
  return detail::with_groups("rl::zero_variance_fraction", scores, groups, [&](const at::Tensor& all, const detail::Groups& g) {
    const auto several = g.sizes.gt(1);
    const auto count = several.sum().item<int64_t>();
    const auto equal = several.logical_and(detail::differ_from_first(all, g).logical_not()).sum().item<int64_t>();
    return count == 0 ? 0.0 : static_cast<double>(equal) / static_cast<double>(count);
  });
}

inline at::Tensor fapo_scores(const at::Tensor& right, const at::Tensor& flawed, double penalty, at::ScalarType dtype) {
  detail::check_alike("rl::fapo_scores", "flawed", flawed, "right", right);
  require(penalty >= 0, "rl::fapo_scores", "got a penalty of {}; expected 0 or more", penalty);
  const auto is_right = right.ne(0);
  return is_right.to(dtype).mul(2).sub(1) - is_right.logical_and(flawed.ne(0)).to(dtype).mul(penalty);
}

inline double fapo_verdict_score(int64_t verdict, int64_t truth, int64_t steps) {
  require(steps > 0 && truth >= -1 && truth < steps, "rl::fapo_verdict_score", "got a truth of {} of {} steps; expected -1 or a step",
          truth, steps);
  if (verdict < -1 || verdict >= steps || (verdict == -1) != (truth == -1)) return -1;
  return truth == -1 ? 1 : 1 - std::abs(static_cast<double>(verdict - truth)) / static_cast<double>(steps);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
