// Losses of a policy. Each takes what is known of the tokens, the global counts, and its own options:
//
//   auto policy = rl::ppo_loss({.logp = logp, .old_logp = old_logp, .advantages = advantages, .mask = mask}, {.counts = counts},
//                              {.clip_low = 0.2, .clip_high = 0.28});
//   policy.loss.backward();
//
// In the formulas, for each token: A its advantage, D = logp - old_logp clamped to [-20, 20], r = exp(D), sg() without gradient, w the
// weight. Tokens whose mask is 0 have no part in the loss and get a gradient of 0, whatever their numbers are.
#pragma once

#include <dtensor/rl/aggregate.hpp>
#include <dtensor/rl/kl.hpp>

#include <ATen/ops/where.h>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Tensors [batch, time], all plain or all DTensors on one mesh (inside Spmd, mixed), float32 or float64. Only `logp` gets a gradient.
struct PolicyTerms {
  at::Tensor logp;      // log-probabilities of the chosen tokens under the policy that learns
  at::Tensor old_logp;  // and under the one that ratios refer to
  at::Tensor advantages;
  at::Tensor mask;       // of any dtype; 0: not a token of the policy
  at::Tensor weights{};  // of rollout correction (correction.hpp), multiplied into each token's loss; undefined: 1
};

// All are 0-dim and without gradient, and add up over microbatches as the loss does: sums over tokens divided by counts.tokens.
struct PolicyMetrics {
  at::Tensor clip_fraction;        // tokens whose gradient is cut, by the side that the method cuts first
  at::Tensor clip_fraction_lower;  // tokens cut by a second bound: PPO's dual clip, DPPO's largest ratio, GMPO's lower side
  at::Tensor approx_kl;            // mean of -D
};

struct PolicyLoss {
  at::Tensor loss;
  PolicyMetrics metrics;
};

// Every loss throws for tensors of other shapes and dtypes, for counts of 0, and for options that make no sense. None communicates by
// itself: under sharded tensors losses and metrics are Partial until they are read.

// Clipped surrogate (Schulman et al., arXiv 1707.06347, eq. 7), with two sides ("clip higher": DAPO, arXiv 2503.14476) and dual clip
// (Ye et al., arXiv 1912.09729):  l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and min(l, -c A) where A < 0.
struct PpoOptions {
  double clip_low = 0.2;
  double clip_high = 0.2;
  double dual_clip = 3;  // c, above 1; 0: none
};
PolicyLoss ppo_loss(const PolicyTerms& terms, const Normalization& by, const PpoOptions& options = {});

// GSPO in its token form (arXiv 2507.18071): s = sg(exp(mean over the sequence of D)) * exp(logp - sg(logp)), clipped as in PPO
// without dual clip. Always a mean over sequences of means over tokens: by.how is not read. log s is at most 10.
struct GspoOptions {
  double clip_low = 3e-4;
  double clip_high = 4e-4;
};
PolicyLoss gspo_loss(const PolicyTerms& terms, const Normalization& by, const GspoOptions& options = {});

// CISPO (MiniMax-M1, arXiv 2506.13585): l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp. A clip_low of 1 is no lower bound.
struct CispoOptions {
  double clip_low = 1;
  double clip_high = 0.2;
};
PolicyLoss cispo_loss(const PolicyTerms& terms, const Normalization& by, const CispoOptions& options = {});

// SAPO (arXiv 2511.20347): l = -A sigmoid(tau (r - 1)) 4 / tau, tau = tau_positive where A > 0, else tau_negative. Always a mean over
// sequences of means over tokens: by.how is not read. Nothing is cut, so both fractions are 0.
struct SapoOptions {
  double tau_positive = 1;
  double tau_negative = 1.05;
};
PolicyLoss sapo_loss(const PolicyTerms& terms, const Normalization& by, const SapoOptions& options = {});

// GMPO (arXiv 2507.20673): the geometric mean of a sequence's ratios, each cut on one side:
// l = -mean(A) exp(mean over tokens of s min(s D, s clip(D, -clip_low, clip_high))), s = sign(A). A mean over sequences that have tokens
// (verl divides by all rows): by.how is not read. The weight of a sequence is the geometric mean of its tokens' weights, so a
// weight of 0 takes the sequence out.
struct GmpoOptions {
  double clip_low = 0.4;  // in log space
  double clip_high = 0.4;
};
PolicyLoss gmpo_loss(const PolicyTerms& terms, const Normalization& by, const GmpoOptions& options = {});

// REINFORCE, and GPG's loss (arXiv 2504.02546): l = -A logp w. `old_logp` is only for the metric, and may be undefined.
PolicyLoss gpg_loss(const PolicyTerms& terms, const Normalization& by);

// DRO (arXiv 2405.19107, with advantages in place of reward minus value): l = -(A logp - beta / 2 (logp - old_logp)^2). Here D is not
// clamped, so that the pull back never ends.
PolicyLoss dro_loss(const PolicyTerms& terms, const Normalization& by, double beta);

// DPPO (arXiv 2602.04879): l = -A sg(min(r, max_ratio)) logp keep. A token is kept while its probability p has not moved too far from the
// old one, p', in the direction of its advantage.
//   total_variation: where A > 0 p - p' <= high, else p - p' >= -low
//   binary_kl:       p' log(p' / p) + (1 - p') log((1 - p' + 1e-8) / (1 - p + 1e-8)) <= high (or low), or it moves back
struct DppoOptions {
  enum class Divergence { total_variation, binary_kl } divergence = Divergence::total_variation;
  double low = 0.2;
  double high = 0.2;
  double max_ratio = 20;
};
PolicyLoss dppo_loss(const PolicyTerms& terms, const Normalization& by, const DppoOptions& options = {});

// VAPO's loss on positive examples (arXiv 2504.05118): the mean of -logp over all tokens of answers that are right. `right` [batch]
// is not 0 for these. `counts` are those of positive_mask(mask, right) of the whole batch; without any token the loss is 0.
at::Tensor positive_mask(const at::Tensor& mask, const at::Tensor& right);
at::Tensor positive_nll(const at::Tensor& logp, const at::Tensor& positive_mask, const Counts& counts);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// The terms without what is masked.
struct HeldTerms {
  at::Tensor held, logp, old_logp, advantages, weights, log_ratio;  // log_ratio clamped
};

inline HeldTerms checked(const char* tag, const PolicyTerms& terms, const Normalization& by) {
  check_tokens(tag, "logp", terms.logp);
  check_alike(tag, "old_logp", terms.old_logp, "logp", terms.logp);
  check_alike(tag, "the advantages", terms.advantages, "logp", terms.logp);
  check_alike(tag, "the mask", terms.mask, "logp", terms.logp);
  if (terms.weights.defined()) check_alike(tag, "the weights", terms.weights, "logp", terms.logp);
  check_counts(tag, by);
  HeldTerms t;
  t.held = held(terms.mask);
  t.logp = only(terms.logp, t.held);
  t.old_logp = only(terms.old_logp.detach(), t.held);
  t.advantages = only(terms.advantages.detach(), t.held);
  if (terms.weights.defined()) t.weights = only(terms.weights.detach(), t.held);
  t.log_ratio = (t.logp - t.old_logp).clamp(-kMostLogRatio, kMostLogRatio);
  return t;
}

inline void check_clip(const char* tag, double low, double high) {
  require(low >= 0 && high >= 0, tag, "got clip_low {} and clip_high {}; expected 0 or more", low, high);
}

// The share of tokens for which `cut` is true.
inline at::Tensor fraction(const at::Tensor& cut, const HeldTerms& t, const Normalization& by) {
  return cut.logical_and(t.held).sum().to(t.logp.scalar_type()).div(static_cast<double>(by.counts.tokens));
}

inline PolicyMetrics metrics_of(const HeldTerms& t, const Normalization& by, const at::Tensor& cut, const at::Tensor& cut_lower) {
  const at::NoGradGuard no_grad;
  const auto kl = t.log_ratio.detach().neg().sum().div(static_cast<double>(by.counts.tokens));
  const auto none = kl.mul(0);
  return {cut.defined() ? fraction(cut, t, by) : none, cut_lower.defined() ? fraction(cut_lower, t, by) : none, kl};
}

// From the tokens' losses.
inline PolicyLoss finish(const at::Tensor& losses, const HeldTerms& t, const Normalization& by, const at::Tensor& cut = {},
                         const at::Tensor& cut_lower = {}) {
  const auto weighted = t.weights.defined() ? losses * t.weights : losses;
  return {aggregate_held(only(weighted, t.held), t.held, by), metrics_of(t, by, cut, cut_lower)};
}

inline Normalization by_sequences(Normalization by) {
  by.how = Aggregation::sequence_mean_token_mean;
  return by;
}

inline at::Tensor lengths_of(const at::Tensor& held, at::ScalarType dtype) { return held.sum(1).clamp_min(1).to(dtype); }

struct Clipped {
  at::Tensor losses, cut;
};

inline Clipped clipped_surrogate(const at::Tensor& advantages, const at::Tensor& ratio, double low, double high) {
  const auto free = (advantages * ratio).neg();
  const auto bound = (advantages * ratio.clamp(1 - low, 1 + high)).neg();
  return {free.maximum(bound), bound.gt(free)};
}

}  // namespace detail

inline PolicyLoss ppo_loss(const PolicyTerms& terms, const Normalization& by, const PpoOptions& options) {
  const auto* tag = "rl::ppo_loss";
  detail::check_clip(tag, options.clip_low, options.clip_high);
  require(options.dual_clip == 0 || options.dual_clip > 1, tag, "got a dual_clip of {}; expected a number above 1, or 0 for none",
          options.dual_clip);
  const auto t = detail::checked(tag, terms, by);
  const auto [losses, cut] = detail::clipped_surrogate(t.advantages, t.log_ratio.exp(), options.clip_low, options.clip_high);
  if (options.dual_clip == 0) return detail::finish(losses, t, by, cut);
  const auto bound = t.advantages.mul(-options.dual_clip);
  const auto is_bad = t.advantages.lt(0);
  return detail::finish(at::where(is_bad, losses.minimum(bound), losses), t, by, cut, losses.gt(bound).logical_and(is_bad));
}

inline PolicyLoss gspo_loss(const PolicyTerms& terms, const Normalization& by, const GspoOptions& options) {
  const auto* tag = "rl::gspo_loss";
  detail::check_clip(tag, options.clip_low, options.clip_high);
  const auto t = detail::checked(tag, terms, by);
  const auto d = (t.logp - t.old_logp).detach();
  const auto mean = d.sum(1).div(detail::lengths_of(t.held, d.scalar_type())).unsqueeze(1);
  const auto ratio = (t.logp - t.logp.detach() + mean).clamp_max(10).exp();
  const auto [losses, cut] = detail::clipped_surrogate(t.advantages, ratio, options.clip_low, options.clip_high);
  return detail::finish(losses, t, detail::by_sequences(by), cut);
}

inline PolicyLoss cispo_loss(const PolicyTerms& terms, const Normalization& by, const CispoOptions& options) {
  const auto* tag = "rl::cispo_loss";
  detail::check_clip(tag, options.clip_low, options.clip_high);
  const auto t = detail::checked(tag, terms, by);
  const auto ratio = t.log_ratio.detach().exp();
  const auto clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high);
  return detail::finish((clipped * t.advantages * t.logp).neg(), t, by, ratio.ne(clipped));
}

inline PolicyLoss sapo_loss(const PolicyTerms& terms, const Normalization& by, const SapoOptions& options) {
  const auto* tag = "rl::sapo_loss";
  require(options.tau_positive > 0 && options.tau_negative > 0, tag, "got tau_positive {} and tau_negative {}; expected positive numbers",
          options.tau_positive, options.tau_negative);
  const auto t = detail::checked(tag, terms, by);
  const auto away = t.log_ratio.expm1();
  const auto gate = [&](double tau) { return away.mul(tau).sigmoid().mul(4 / tau); };
  const auto gates = at::where(t.advantages.gt(0), gate(options.tau_positive), gate(options.tau_negative));
  return detail::finish((gates * t.advantages).neg(), t, detail::by_sequences(by));
}

inline PolicyLoss gmpo_loss(const PolicyTerms& terms, const Normalization& by, const GmpoOptions& options) {
  const auto* tag = "rl::gmpo_loss";
  detail::check_clip(tag, options.clip_low, options.clip_high);
  const auto t = detail::checked(tag, terms, by);
  const auto sign = t.advantages.sign();
  const auto within = t.log_ratio.clamp(-options.clip_low, options.clip_high);
  const auto cut_one_side = sign * (sign * t.log_ratio).minimum(sign * within);
  const auto lengths = detail::lengths_of(t.held, t.logp.scalar_type());
  auto losses = (t.advantages.sum(1).div(lengths) * cut_one_side.sum(1).div(lengths).exp()).neg();
  if (t.weights.defined()) losses = losses * detail::only(t.weights.log(), t.held).sum(1).div(lengths).exp();
  const auto cut = t.log_ratio.ne(within);
  return {aggregate_sequences(losses, terms.mask, by),
          detail::metrics_of(t, by, cut.logical_and(t.advantages.gt(0)), cut.logical_and(t.advantages.lt(0)))};
}

inline PolicyLoss gpg_loss(const PolicyTerms& terms, const Normalization& by) {
  auto with_old = terms;
  if (!terms.old_logp.defined()) with_old.old_logp = terms.logp.detach();
  const auto t = detail::checked("rl::gpg_loss", with_old, by);
  return detail::finish((t.advantages * t.logp).neg(), t, by);
}

inline PolicyLoss dro_loss(const PolicyTerms& terms, const Normalization& by, double beta) {
  require(beta > 0, "rl::dro_loss", "got a beta of {}; expected a positive number", beta);
  const auto t = detail::checked("rl::dro_loss", terms, by);
  return detail::finish((t.logp - t.old_logp).square().mul(beta / 2) - t.advantages * t.logp, t, by);
}

namespace detail {

inline at::Tensor dppo_keeps(const HeldTerms& t, const DppoOptions& options) {
  const auto logp = t.logp.detach(), p = logp.exp(), old_p = t.old_logp.exp();
  const auto is_good = t.advantages.gt(0);
  if (options.divergence == DppoOptions::Divergence::total_variation) {
    const auto moved = p - old_p;
    return at::where(is_good, moved.le(options.high), moved.ge(-options.low));
  }
  const auto others = old_p.neg().add(1 + 1e-8).div(p.neg().add(1 + 1e-8)).log();
  const auto kl = old_p * (t.old_logp - logp) + old_p.neg().add(1) * others;
  return at::where(is_good, kl.le(options.high).logical_or(p.le(old_p)), kl.le(options.low).logical_or(p.ge(old_p)));
}

}  // namespace detail

inline PolicyLoss dppo_loss(const PolicyTerms& terms, const Normalization& by, const DppoOptions& options) {
  const auto* tag = "rl::dppo_loss";
  require(options.low >= 0 && options.high >= 0 && options.max_ratio > 0, tag, "got bounds {} and {} and a max_ratio of {}; expected {}",
          options.low, options.high, options.max_ratio, "0 or more, and a positive number");
  const auto t = detail::checked(tag, terms, by);
  const auto keeps = detail::dppo_keeps(t, options);
  const auto ratio = t.log_ratio.detach().exp();
  const auto losses = (t.advantages * ratio.clamp_max(options.max_ratio) * t.logp * keeps.to(t.logp.scalar_type())).neg();
  return detail::finish(losses, t, by, keeps.logical_not(), ratio.gt(options.max_ratio).logical_and(keeps));
}

inline at::Tensor positive_mask(const at::Tensor& mask, const at::Tensor& right) {
  detail::check_rows("rl::positive_mask", "right", right, mask);
  return detail::held(mask).logical_and(right.ne(0).unsqueeze(1));
}

inline at::Tensor positive_nll(const at::Tensor& logp, const at::Tensor& positive_mask, const Counts& counts) {
  detail::check_tokens("rl::positive_nll", "logp", logp);
  detail::check_alike("rl::positive_nll", "the mask", positive_mask, "logp", logp);
  return detail::only(logp, detail::held(positive_mask)).sum().neg().div(static_cast<double>(std::max<int64_t>(counts.tokens, 1)));
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
