// Advantages of tokens and of turns with a critic, and of tokens without one.
//
// A token whose mask is 0 (what a tool wrote, padding) is passed over: its reward and value do not count, nothing is discounted there, and
// its advantage and return are 0. So a reward has to stand at a token whose mask is 1: at_last_token() puts scores there.
#pragma once

#include <dtensor/rl/advantages/recurrence.hpp>
#include <dtensor/rl/advantages/whiten.hpp>

#include <ATen/ops/where.h>

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// [batch, time] in the rewards' dtype (computed in float64), without gradient.
struct Advantages {
  at::Tensor advantages;
  at::Tensor returns;  // what a critic learns
};

// All tensors below are [batch, time], plain, or DTensors on one mesh; float32 or float64, masks of any dtype. Sharded batch dims
// communicate only for whitening and for the check that rewards are finite. All throw for other shapes, for gamma and lambda outside of [0,
// 1], and for rewards that are NaN or infinite.

struct GaeOptions {
  double gamma = 1;
  double lambda = 1;
  // Lambda of the returns; as the policy's if it is not given. VAPO (arXiv 2504.05118) has 1: "decoupled".
  std::optional<double> critic_lambda{};
  // Above 0: the policy's lambda depends on a sequence's number l of tokens, lambda = 1 - 1 / (length_alpha l), or length_least_lambda
  // where that is more, in place of the one above (VAPO has 0.05 for answers of thousands of tokens, and 0).
  double length_alpha = 0;
  double length_least_lambda = 0;
  bool whiten = true;  // advantages, over the whole batch, after the returns are known
};

// Generalized advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16), from a sequence's last token to its first:
//   delta_t = r_t + gamma V_next - V_t,  A_t = delta_t + gamma lambda A_next,  return_t = A_t + V_t
// where "next" is the next token whose mask is 1, behind the last 0.
Advantages gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, const GaeOptions& options = {});

// The same with turns in place of tokens: a turn's reward is the sum of its tokens', its value that of its first token; all its tokens
// get its advantage. Returns stand at the first tokens only, and `value_mask` says where. A turn is a run of tokens whose mask is 1; or,
// with `turns` (int64, not decreasing along a sequence), all tokens with one number.
struct TurnAdvantages {
  at::Tensor advantages, returns;
  at::Tensor value_mask;  // bool
};
TurnAdvantages turn_gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, const at::Tensor& turns = {},
                        const GaeOptions& options = {});

// REINFORCE++ (arXiv 2501.03262): returns G_t = r_t + gamma G_next, advantages whiten(G).
Advantages reinforce_plus_plus(const at::Tensor& rewards, const at::Tensor& mask, double gamma = 1);

// ReMax (arXiv 2310.10505): returns are the rewards from here on, advantages are these minus `greedy_scores` [batch], what the greedy
// answer to the same prompt got.
Advantages remax(const at::Tensor& rewards, const at::Tensor& greedy_scores, const at::Tensor& mask);

// Rewards [batch, time] with each score of `scores` [batch] at its sequence's last token, 0 elsewhere; a sequence without tokens has none.
at::Tensor at_last_token(const at::Tensor& scores, const at::Tensor& mask);

// [batch]: the sum of each sequence's rewards over its tokens.
at::Tensor scores_of(const at::Tensor& rewards, const at::Tensor& mask);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline void check_rewards(const char* tag, const at::Tensor& rewards, const at::Tensor& mask) {
  check_tokens(tag, "rewards", rewards);
  check_alike(tag, "the mask", mask, "rewards", rewards);
  const auto is_bad = rewards.detach().isfinite().logical_not().logical_and(held(mask)).any();
  require(!full_tensor(is_bad).item<bool>(), tag,
          "a reward of {} is NaN or infinite; expected finite numbers; hint: a verifier's failure "
          "should score 0",
          shape_of(rewards));
}

inline void check_gae(const char* tag, const GaeOptions& o) {
  const auto in_unit = [](double x) { return x >= 0 && x <= 1; };
  require(in_unit(o.gamma) && in_unit(o.lambda) && in_unit(o.critic_lambda.value_or(1)) && o.length_alpha >= 0, tag,
          "got gamma {}, lambda {}, critic_lambda {} and length_alpha {}; expected numbers from 0 to 1, and 0 or more", o.gamma, o.lambda,
          o.critic_lambda.value_or(o.lambda), o.length_alpha);
  require(in_unit(o.length_least_lambda), tag, "got a length_least_lambda of {}; expected a number from 0 to 1", o.length_least_lambda);
}

// Recurrences are computed in float64: a power of gamma in float32 has lost digits after a few hundred tokens.
inline at::Tensor exact(const at::Tensor& x, const at::Tensor& held) { return only(x.detach(), held).to(at::kDouble); }

// A of steps that stand where `held` is true. `decay` is gamma lambda: [batch, 1], or one number.
inline at::Tensor advantages_of_steps(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& held, double gamma,
                                      const at::Tensor& decay) {
  const auto is = held.to(at::kDouble);
  const auto delta = rewards + ahead(next_held(values, held), 1).mul(gamma) - values;
  return recur_back(is * decay + is.neg().add(1), delta * is);
}

// gamma lambda of the policy, which broadcasts over [batch, time].
inline at::Tensor policy_decay(const at::Tensor& steps, const GaeOptions& o) {
  const auto lengths = steps.sum(1, /*keepdim=*/true).clamp_min(1).to(at::kDouble);
  if (o.length_alpha == 0) return lengths.mul(0).add(o.gamma * o.lambda);
  return lengths.mul(o.length_alpha).reciprocal().neg().add(1).clamp_min(o.length_least_lambda).mul(o.gamma);
}

// Both, at `steps`; what is between two steps has the numbers of the next.
inline Advantages of_steps(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& steps, const GaeOptions& o) {
  const auto decay = policy_decay(steps, o);
  const auto advantages = advantages_of_steps(rewards, values, steps, o.gamma, decay);
  const double critic_lambda = o.critic_lambda.value_or(o.lambda);
  const bool is_same = o.length_alpha == 0 && critic_lambda == o.lambda;
  const auto critics =
      is_same ? advantages : advantages_of_steps(rewards, values, steps, o.gamma, decay.mul(0).add(o.gamma * critic_lambda));
  return {advantages, only(critics + values, steps)};
}

// Where turns begin: bool.
inline at::Tensor turn_starts(const at::Tensor& held, const at::Tensor& turns) {
  if (!turns.defined()) return held.logical_and(ahead(held.to(at::kLong), -1).eq(0));
  const auto seen = std::get<0>(turns.add(1).masked_fill(held.logical_not(), 0).cummax(1));  // turns count from 1 here
  return held.logical_and(turns.add(1).gt(ahead(seen, -1)));
}

}  // namespace detail

inline Advantages gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, const GaeOptions& options) {
  const at::NoGradGuard no_grad;
  const auto* tag = "rl::gae";
  detail::check_gae(tag, options);
  detail::check_rewards(tag, rewards, mask);
  detail::check_alike(tag, "the values", values, "rewards", rewards);
  const auto held = detail::held(mask);
  const auto result = detail::of_steps(detail::exact(rewards, held), detail::exact(values, held), held, options);
  const auto advantages = options.whiten ? whiten(result.advantages, held) : detail::only(result.advantages, held);
  return {advantages.to(rewards.scalar_type()), result.returns.to(rewards.scalar_type())};
}

inline TurnAdvantages turn_gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, const at::Tensor& turns,
                               const GaeOptions& options) {
  const at::NoGradGuard no_grad;
  const auto* tag = "rl::turn_gae";
  detail::check_gae(tag, options);
  detail::check_rewards(tag, rewards, mask);
  detail::check_alike(tag, "the values", values, "rewards", rewards);
  if (turns.defined()) {
    detail::check_alike(tag, "the turns", turns, "rewards", rewards);
    detail::check_ids(tag, "turns", turns);
  }
  const auto held = detail::held(mask), starts = detail::turn_starts(held, turns);
  const auto goes_on = detail::ahead(starts.to(at::kDouble), 1).neg().add(1);  // 0 before a start
  const auto sums = detail::recur_back(goes_on, detail::exact(rewards, held));
  const auto steps = detail::of_steps(detail::only(sums, starts), detail::exact(values, starts), starts, options);
  const auto for_all = detail::last_held(steps.advantages, starts);
  const auto advantages = options.whiten ? whiten(for_all, held) : detail::only(for_all, held);
  return {advantages.to(rewards.scalar_type()), steps.returns.to(rewards.scalar_type()), starts};
}

inline Advantages reinforce_plus_plus(const at::Tensor& rewards, const at::Tensor& mask, double gamma) {
  const at::NoGradGuard no_grad;
  detail::check_gae("rl::reinforce_plus_plus", {.gamma = gamma});
  detail::check_rewards("rl::reinforce_plus_plus", rewards, mask);
  const auto held = detail::held(mask), is = held.to(at::kDouble);
  const auto returns = detail::only(detail::recur_back(is.mul(gamma - 1).add(1), detail::exact(rewards, held)), held);
  return {whiten(returns, held).to(rewards.scalar_type()), returns.to(rewards.scalar_type())};
}

inline Advantages remax(const at::Tensor& rewards, const at::Tensor& greedy_scores, const at::Tensor& mask) {
  const at::NoGradGuard no_grad;
  detail::check_rewards("rl::remax", rewards, mask);
  detail::check_rows("rl::remax", "the greedy scores", greedy_scores, mask);
  const auto held = detail::held(mask);
  const auto returns = detail::only(detail::only(rewards, held).flip({1}).cumsum(1).flip({1}), held);
  return {detail::only(returns - greedy_scores.unsqueeze(1), held), returns};
}

inline at::Tensor at_last_token(const at::Tensor& scores, const at::Tensor& mask) {
  detail::check_rows("rl::at_last_token", "scores", scores, mask);
  const auto held = detail::held(mask);
  const auto later = detail::ahead(held.to(at::kLong), 1).flip({1}).cumsum(1).flip({1});
  return scores.detach().unsqueeze(1) * held.logical_and(later.eq(0)).to(scores.scalar_type());
}

inline at::Tensor scores_of(const at::Tensor& rewards, const at::Tensor& mask) {
  detail::check_tokens("rl::scores_of", "rewards", rewards);
  detail::check_alike("rl::scores_of", "the mask", mask, "rewards", rewards);
  return detail::only(rewards.detach(), detail::held(mask)).sum(1);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
