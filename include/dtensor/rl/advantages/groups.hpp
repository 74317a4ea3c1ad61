// Advantages of whole answers, by comparing the answers to one prompt: GRPO and its relatives.
//
// Each takes `scores` [batch] (float32 or float64: what an answer got), `groups` int64 [batch] (any number for each prompt; answers with
// the same one are a group, wherever they stand) and `mask` [batch, time], and gives [batch, time] in the scores' dtype: an answer's
// advantage at each of its tokens, 0 where masked, without gradient. They take the whole batch: a group that is cut in two is two groups.
//
// Plain tensors, or DTensors on one mesh. Scores and group numbers of DTensors are gathered (16 bytes for each answer), and groups are
// computed from the whole in float64, so that every rank has the bits of one device. All throw for other shapes and dtypes, and for scores
// that are NaN or infinite.
#pragma once

#include <dtensor/rl/advantages/whiten.hpp>

#include <ATen/ops/_unique2.h>
#include <ATen/ops/zeros.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What an answer that is alone in its group gets, since there is nothing to compare it with.
enum class LoneAnswer {
  zero,   // no advantage: it is its group's mean. (verl's rloo_vectorized)
  score,  // its score, as if the mean were 0 and the standard deviation 1. (verl's grpo, opo, rloo, gpg)
  refuse  // an error. (TRL)
};

struct GrpoOptions {
  bool by_std = true;  // false: Dr.GRPO
  double eps = 1e-6;   // beside the standard deviation (AReaL: 1e-5; TRL: 1e-4)
  LoneAnswer alone = LoneAnswer::zero;
};

// (R - mean) / (std + eps) of the group, with the unbiased standard deviation (GRPO, DeepSeekMath, arXiv 2402.03300). Without
// by_std R - mean (Dr.GRPO, arXiv 2503.20783).
at::Tensor grpo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, const GrpoOptions& options = {});

// Only a group's best answer has an advantage: its score minus that of the second best, by_std divided by (std + eps) (arXiv 2503.19595).
// Of equal ones it is 0. Throws for a group of one, whatever `alone` says.
at::Tensor grpo_pass_at_k(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, const GrpoOptions& options = {});

// GDPO (arXiv 2601.05242): `scores` [batch, kinds] are compared in their groups kind by kind; the sum over kinds of weight times advantage,
// whitened over the tokens of the batch. No weights: 1 for each. Throws for another number of weights.
at::Tensor gdpo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, const std::vector<double>& weights = {},
                const GrpoOptions& options = {});

// RLOO (arXiv 2402.14740): R minus the mean of the group's other answers, = n / (n - 1) (R - mean).
at::Tensor rloo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, LoneAnswer alone = LoneAnswer::zero);

// OPO (arXiv 2505.23585): R - sum(length R) / sum(length) of the group; lengths are numbers of tokens whose mask is not 0.
at::Tensor opo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, LoneAnswer alone = LoneAnswer::zero);

// GPG (arXiv 2504.02546): alpha (R - mean) / norm, alpha = answers / answers whose score is not 0 (as verl counts).
at::Tensor gpg(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, double norm = 1,
               LoneAnswer alone = LoneAnswer::zero);

// REINFORCE++ with a baseline (arXiv 2501.03262): R - mean of the group, whitened over the tokens of the batch.
at::Tensor reinforce_plus_plus_baseline(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask,
                                        LoneAnswer alone = LoneAnswer::zero);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Who is in which group. Plain tensors, float64 but for `index`; for use outside of Spmd.
struct Groups {
  at::Tensor index;  // [batch] from 0
  at::Tensor sizes;  // [groups]
  at::Tensor alone;  // [batch] bool

  at::Tensor sums(const at::Tensor& x) const { return at::zeros(sizes.sizes(), x.options()).index_add(0, index, x); }
  at::Tensor of_each(const at::Tensor& per_group) const { return per_group.index_select(0, index); }
  at::Tensor means(const at::Tensor& x) const { return of_each(sums(x).div(sizes)); }
  // Unbiased; 0 of a group of one.
  at::Tensor deviations(const at::Tensor& x) const { return of_each(sums((x - means(x)).square()).div(sizes.sub(1).clamp_min(1)).sqrt()); }
};

inline Groups groups_of(const at::Tensor& ids) {
  Groups g;
  auto found = at::_unique2(ids, /*sorted=*/true, /*return_inverse=*/true, /*return_counts=*/true);
  g.index = std::get<1>(found);
  g.sizes = std::get<2>(found).to(at::kDouble);
  g.alone = g.of_each(g.sizes).eq(1);
  return g;
}

// Runs `advantage(scores, groups)`, plain float64 [batch], and gives it to the tokens.
template <class F>
at::Tensor by_groups(const char* tag, const at::Tensor& scores, const at::Tensor& ids, const at::Tensor& mask, LoneAnswer alone,
                     F advantage) {
  const at::NoGradGuard no_grad;
  check_rows(tag, "scores", scores, mask);
  check_rows(tag, "groups", ids, mask);
  check_ids(tag, "groups", ids);
  require(scores.is_floating_point(), tag, "scores are of {}; expected a floating-point dtype", c10::toString(scores.scalar_type()));
  const auto all = whole(scores), all_ids = whole(ids);
  const auto tokens = held(mask);
  const NoSpmd plain;
  check_finite(tag, "scores", all);
  const auto exact = all.to(at::kDouble);
  const auto groups = groups_of(all_ids);
  auto rows = advantage(exact, groups);
  if (alone == LoneAnswer::refuse && groups.alone.any().template item<bool>())
    fail(tag, "an answer of the {} is alone in its group; expected two or more answers to each prompt", exact.size(0));
  if (alone != LoneAnswer::refuse) rows = rows.where(groups.alone.logical_not(), alone == LoneAnswer::zero ? rows.mul(0) : exact);
  return for_tokens(rows, tokens, scores.scalar_type());
}

inline at::Tensor compared(const at::Tensor& scores, const Groups& groups, const GrpoOptions& options) {
  const auto away = scores - groups.means(scores);
  return options.by_std ? away.div(groups.deviations(scores).add(options.eps)) : away;
}

inline void check_eps(const char* tag, const GrpoOptions& options) {
  require(options.eps > 0, tag, "got an eps of {}; expected a positive number", options.eps);
}

// The best of each group minus the second best, at the first answer that has it.
inline at::Tensor lead_of_best(const at::Tensor& scores, const Groups& groups) {
  const auto count = scores.size(0);
  const auto index = groups.index.contiguous();
  const auto* group = index.data_ptr<int64_t>();
  const auto values = scores.contiguous();
  const auto* score = values.data_ptr<double>();
  auto lead = at::zeros({count}, scores.options());
  std::vector<int64_t> best(groups.sizes.size(0), -1);
  std::vector<double> second(best.size(), -INFINITY);
  for (int64_t i = 0; i < count; ++i) {
    auto& top = best[group[i]];
    if (top < 0 || score[i] > score[top]) {
      if (top >= 0) second[group[i]] = score[top];
      top = i;
    } else {
      second[group[i]] = std::max(second[group[i]], score[i]);
    }
  }
  for (size_t g = 0; g < best.size(); ++g) lead.data_ptr<double>()[best[g]] = score[best[g]] - second[g];
  return lead;
}

}  // namespace detail

inline at::Tensor grpo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, const GrpoOptions& options) {
  detail::check_eps("rl::grpo", options);
  return detail::by_groups("rl::grpo", scores, groups, mask, options.alone,
                           [&](const at::Tensor& all, const detail::Groups& g) { return detail::compared(all, g, options); });
}

inline at::Tensor grpo_pass_at_k(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, const GrpoOptions& options) {
  detail::check_eps("rl::grpo_pass_at_k", options);
  return detail::by_groups("rl::grpo_pass_at_k", scores, groups, mask, LoneAnswer::refuse,
                           [&](const at::Tensor& all, const detail::Groups& g) {
                             const detail::Groups there{g.index.cpu(), g.sizes.cpu(), g.alone};
                             const auto lead = detail::lead_of_best(all.cpu(), there).to(all.device());
                             return options.by_std ? lead.div(g.deviations(all).add(options.eps)) : lead;
                           });
}

inline at::Tensor gdpo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, const std::vector<double>& weights,
                       const GrpoOptions& options) {
  const auto* tag = "rl::gdpo";
  detail::check_eps(tag, options);
  require(scores.defined() && scores.dim() == 2, tag, "got {} for the scores; expected [batch, kinds]", detail::shape_of(scores));
  require(weights.empty() || static_cast<int64_t>(weights.size()) == scores.size(1), tag, "got {} weights for scores of {}", weights.size(),
          detail::shape_of(scores));
  at::Tensor sum;
  for (int64_t kind = 0; kind < scores.size(1); ++kind) {
    const auto advantages = grpo(scores.select(1, kind), groups, mask, options).mul(weights.empty() ? 1 : weights[kind]);
    sum = sum.defined() ? sum + advantages : advantages;
  }
  require(sum.defined(), tag, "got {} for the scores; expected a kind or more", detail::shape_of(scores));
  return whiten(sum, mask);
}

inline at::Tensor rloo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, LoneAnswer alone) {
  return detail::by_groups("rl::rloo", scores, groups, mask, alone, [](const at::Tensor& all, const detail::Groups& g) {
    return (all - g.means(all)) * g.of_each(g.sizes.div(g.sizes.sub(1).clamp_min(1)));
  });
}

inline at::Tensor opo(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, LoneAnswer alone) {
  detail::check_rows("rl::opo", "scores", scores, mask);
  const auto lengths = detail::whole(detail::held(mask).sum(1));
  return detail::by_groups("rl::opo", scores, groups, mask, alone, [&](const at::Tensor& all, const detail::Groups& g) {
    const auto weights = lengths.to(at::kDouble);
    return all - g.of_each(g.sums(all * weights).div(g.sums(weights).clamp_min(1)));
  });
}

inline at::Tensor gpg(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask, double norm, LoneAnswer alone) {
  require(norm > 0, "rl::gpg", "got a norm of {}; expected a positive number", norm);
  double factor = 0;
  const auto advantages = detail::by_groups("rl::gpg", scores, groups, mask, alone, [&](const at::Tensor& all, const detail::Groups& g) {
    factor = static_cast<double>(all.size(0)) / std::max<double>(1, all.ne(0).sum().item<double>()) / norm;
    return all - g.means(all);
  });
  return advantages.mul(factor);
}

inline at::Tensor reinforce_plus_plus_baseline(const at::Tensor& scores, const at::Tensor& groups, const at::Tensor& mask,
                                               LoneAnswer alone) {
  const auto* tag = "rl::reinforce_plus_plus_baseline";
  return whiten(detail::by_groups(tag, scores, groups, mask, alone,
                                  [](const at::Tensor& all, const detail::Groups& g) { return all - g.means(all); }),
                mask);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
