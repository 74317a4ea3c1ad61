// The optimal baseline of each token (OTB), from the answers to one prompt.
#pragma once

#include <dtensor/rl/advantages/gae.hpp>
#include <dtensor/rl/advantages/groups.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// With the rewards from here on, G, and w_t = 1 - 2 p_t + sum p^2 (the expected square of the score function: p_t the chosen token's
// probability, the sum over the vocabulary), times weight^2 under rollout correction:
//   W_t = w_1 + ... + w_t,  B_t = sum_i G W / (sum_i W + 1e-8) over a group's answers that have a t-th token,  A_t = G_t - B_t
// Positions count tokens whose mask is not 0, so that turns of tools between do not shift them (verl's tir_optimal_token_baseline, which is
// its optimal_token_baseline where answers are not interrupted). Beyond the second longest answer of a group, where the longest would be
// compared with itself alone, B is 0; and so for an answer alone in its group.
//
// rewards, logp (of the policy that wrote the answers), sum_squares (see token_statistics in entropy.hpp), weights (or undefined), mask:
// [batch, time]; groups int64 [batch]. The whole batch, as in groups.hpp. DTensors communicate [groups, time] twice and 16 bytes for each
// answer. Throws for other shapes and for rewards that are NaN or infinite.
Advantages optimal_token_baseline(const at::Tensor& rewards, const at::Tensor& logp, const at::Tensor& sum_squares,
                                  const at::Tensor& groups, const at::Tensor& mask, const at::Tensor& weights = {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// [batch]: from which position on an answer has no baseline. Plain.
inline at::Tensor ends_of_baselines(const at::Tensor& lengths, const Groups& groups) {
  const auto there = Groups{groups.index.cpu(), groups.sizes.cpu(), {}};
  const auto own = lengths.to(at::kDouble).cpu();
  const auto lead = lead_of_best(own, there);
  // A group of one leads by infinity.
  return (own - lead).clamp_min(0).to(at::kLong).to(lengths.device());
}

// One for members: [batch, groups].
inline at::Tensor membership(const Groups& groups, at::ScalarType dtype) {
  const auto all = at::zeros({groups.index.size(0), groups.sizes.size(0)}, groups.sizes.options().dtype(dtype));
  return all.scatter(1, groups.index.unsqueeze(1), 1);
}

}  // namespace detail

inline Advantages optimal_token_baseline(const at::Tensor& rewards, const at::Tensor& logp, const at::Tensor& sum_squares,
                                         const at::Tensor& groups, const at::Tensor& mask, const at::Tensor& weights) {
  const at::NoGradGuard no_grad;
  const auto* tag = "rl::optimal_token_baseline";
  detail::check_rewards(tag, rewards, mask);
  detail::check_alike(tag, "logp", logp, "rewards", rewards);
  detail::check_alike(tag, "sum_squares", sum_squares, "rewards", rewards);
  if (weights.defined()) detail::check_alike(tag, "the weights", weights, "rewards", rewards);
  detail::check_rows(tag, "groups", groups, mask);
  detail::check_ids(tag, "groups", groups);
  const auto held = detail::held(mask);
  const auto dtype = rewards.scalar_type();
  const auto returns = detail::only(detail::only(rewards, held).flip({1}).cumsum(1).flip({1}), held);
  auto energy = sum_squares - logp.exp().mul(2) + 1;
  if (weights.defined()) energy = energy * weights.square();
  energy = detail::only(detail::only(energy, held).cumsum(1), held);

  const auto lengths = detail::whole(held.sum(1)), ids = detail::whole(groups);
  at::Tensor members, ends;
  {
    const NoSpmd plain;
    const auto found = detail::groups_of(ids);
    members = detail::membership(found, dtype);
    ends = detail::ends_of_baselines(lengths, found).unsqueeze(1);
  }
  members = detail::beside(members, rewards);
  // Tokens by their number in the answer.
  const auto number = held.to(at::kLong).cumsum(1).sub(1).clamp_min(0);
  const auto lined_up = [&](const at::Tensor& x) { return x.mul(0).scatter_add(1, number, x); };
  const auto above = members.t().matmul(lined_up(returns * energy)), below = members.t().matmul(lined_up(energy));
  const auto baselines = members.matmul(above.div(below.add(1e-8))).gather(1, number);
  const auto has = number.lt(detail::beside(ends, rewards)).logical_and(held);
  return {detail::only(returns - detail::only(baselines, has), held), returns};
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
