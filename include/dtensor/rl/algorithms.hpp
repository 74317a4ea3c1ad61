// Advantages and losses by the names that Options have for them.
#pragma once

#include <dtensor/rl/advantages.hpp>
#include <dtensor/rl/correction.hpp>
#include <dtensor/rl/covariance_losses.hpp>
#include <dtensor/rl/kl.hpp>
#include <dtensor/rl/losses.hpp>
#include <dtensor/rl/options.hpp>
#include <dtensor/rl/shaping.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What advantages are of. All of the whole batch; `rewards` and `values` only for estimators of tokens.
struct AdvantageTerms {
  at::Tensor scores{}, groups{};   // [batch]
  at::Tensor mask{};               // [batch, time]
  at::Tensor rewards{}, values{};  // [batch, time]
};

// As o.advantage says. Returns are defined where there is a critic.
Advantages advantages_by(const Options& o, const AdvantageTerms& terms);
// As o.loss says. `seed` is of losses that draw tokens.
PolicyLoss policy_loss_by(const Options& o, const PolicyTerms& terms, const Normalization& by, uint64_t seed = 0);
Normalization normalization_by(const Options& o, const Counts& counts);
Kl kl_by(const Options& o);

// Scores with what o's penalties of length and of flawed answers change.
at::Tensor shaped_scores(const Options& o, const at::Tensor& scores, const at::Tensor& mask, const at::Tensor& right,
                         const at::Tensor& flawed);

// -- How ------------------------------------------------------------------------------------------------------------------

inline Advantages advantages_by(const Options& o, const AdvantageTerms& t) {
  detail::check_name("advantage", o.advantage, detail::kAdvantages);
  if (o.advantage == "gae") {
    GaeOptions options{.gamma = o.gamma, .lambda = o.lambda, .length_alpha = o.length_alpha};
    if (o.critic_lambda >= 0) options.critic_lambda = o.critic_lambda;
    return gae(t.rewards, t.values, t.mask, options);
  }
  if (o.advantage == "reinforce_plus_plus") return {reinforce_plus_plus(t.rewards, t.mask, o.gamma).advantages, {}};
  if (o.advantage == "grpo") return {grpo(t.scores, t.groups, t.mask), {}};
  if (o.advantage == "drgrpo") return {grpo(t.scores, t.groups, t.mask, {.by_std = false}), {}};
  if (o.advantage == "grpo_pass_at_k") return {grpo_pass_at_k(t.scores, t.groups, t.mask), {}};
  if (o.advantage == "rloo") return {rloo(t.scores, t.groups, t.mask), {}};
  if (o.advantage == "opo") return {opo(t.scores, t.groups, t.mask), {}};
  if (o.advantage == "gpg") return {gpg(t.scores, t.groups, t.mask), {}};
  return {reinforce_plus_plus_baseline(t.scores, t.groups, t.mask), {}};
}

inline PolicyLoss policy_loss_by(const Options& o, const PolicyTerms& terms, const Normalization& by, uint64_t seed) {
  detail::check_name("loss", o.loss, detail::kLosses);
  if (o.loss == "gspo") return gspo_loss(terms, by, {.clip_low = o.clip_low, .clip_high = o.clip_high});
  if (o.loss == "cispo") return cispo_loss(terms, by, {.clip_low = o.clip_low, .clip_high = o.clip_high});
  if (o.loss == "sapo") return sapo_loss(terms, by);
  if (o.loss == "gmpo") return gmpo_loss(terms, by, {.clip_low = o.clip_low, .clip_high = o.clip_high});
  if (o.loss == "gpg") return gpg_loss(terms, by);
  if (o.loss == "dro") return dro_loss(terms, by, 0.1);
  if (o.loss == "dppo") return dppo_loss(terms, by, {.low = o.clip_low, .high = o.clip_high});
  if (o.loss == "clip_cov") return clip_cov_loss(terms, by, {.clip_low = o.clip_low, .clip_high = o.clip_high, .seed = seed});
  if (o.loss == "kl_cov") return kl_cov_loss(terms, by);
  return ppo_loss(terms, by, {.clip_low = o.clip_low, .clip_high = o.clip_high, .dual_clip = o.dual_clip});
}

inline Normalization normalization_by(const Options& o, const Counts& counts) {
  static const std::map<std::string, Aggregation> hows{{"token_mean", Aggregation::token_mean},
                                                       {"token_sum", Aggregation::token_sum},
                                                       {"sequence_mean_token_mean", Aggregation::sequence_mean_token_mean},
                                                       {"sequence_mean_token_sum", Aggregation::sequence_mean_token_sum}};
  detail::check_name("aggregation", o.aggregation, detail::kAggregations);
  return {.counts = counts, .how = hows.at(o.aggregation)};
}

inline Kl kl_by(const Options& o) {
  static const std::map<std::string, Kl> forms{{"k1", Kl::k1}, {"magnitude", Kl::magnitude},   {"k2", Kl::k2},
                                               {"k3", Kl::k3}, {"k1_through", Kl::k1_through}, {"k3_through", Kl::k3_through}};
  require(forms.count(o.kl) > 0, detail::kOptions, "'kl' is '{}', and a divergence is asked for; expected one of {}", o.kl, detail::kKls);
  return forms.at(o.kl);
}

inline at::Tensor shaped_scores(const Options& o, const at::Tensor& scores, const at::Tensor& mask, const at::Tensor& right,
                                const at::Tensor& flawed) {
  auto shaped = scores;
  if (o.flawed_penalty > 0) {
    const auto both = right.ne(0).logical_and(flawed.ne(0));
    shaped = shaped - both.to(scores.scalar_type()).mul(o.flawed_penalty);
  }
  if (o.overlong_buffer > 0) {
    const OverlongOptions options{.longest = o.max_tokens, .buffer = o.overlong_buffer, .penalty = o.overlong_penalty};
    shaped = shaped + overlong_penalty(mask.sum(1), options, scores.scalar_type());
  }
  return shaped;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
