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
  at::Tensor scores{}, groups{};     // [batch]
  at::Tensor parts{};                // [batch, kinds], of gdpo
  at::Tensor greedy_scores{};        // [batch], of remax: what the greedy answer to the prompt got
  at::Tensor mask{};                 // [batch, time]
  at::Tensor rewards{}, values{};    // [batch, time]
  at::Tensor logp{}, sum_squares{};  // [batch, time], of optimal_token_baseline: of the old policy
  at::Tensor weights{};              // [batch, time], or undefined: of rollout correction
};

// As o.advantage says. Returns are defined for estimators of tokens' rewards.
Advantages advantages_by(const Options& o, const AdvantageTerms& terms);
// As o.loss says. `seed` is of losses that draw tokens.
PolicyLoss policy_loss_by(const Options& o, const PolicyTerms& terms, const Normalization& by, uint64_t seed = 0);
Normalization normalization_by(const Options& o, const Counts& counts);
Kl kl_by(const Options& o);
// As o.correction says; undefined for none.
at::Tensor correction_weights(const Options& o, const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask);

// Scores with what o's penalties of length and of flawed answers change.
at::Tensor shaped_scores(const Options& o, const at::Tensor& scores, const at::Tensor& mask, const at::Tensor& right,
                         const at::Tensor& flawed);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

using AdvantageBy = Advantages (*)(const Options& o, const AdvantageTerms& t);
using LossBy = PolicyLoss (*)(const Options& o, const PolicyTerms& t, const Normalization& by, uint64_t seed);

inline Advantages no_returns(at::Tensor advantages) { return {std::move(advantages), {}}; }

inline Advantages gae_by(const Options& o, const AdvantageTerms& t) {
  GaeOptions options{.gamma = o.gamma, .lambda = o.lambda, .length_alpha = o.length_alpha, .length_least_lambda = o.length_least_lambda};
  if (o.critic_lambda >= 0) options.critic_lambda = o.critic_lambda;
  return gae(t.rewards, t.values, t.mask, options);
}

inline const std::map<std::string, AdvantageBy>& advantages_by_name() {
  using O = const Options&;
  using T = const AdvantageTerms&;
  static const std::map<std::string, AdvantageBy> all{
      {"gae", gae_by},
      {"grpo", [](O, T t) { return no_returns(grpo(t.scores, t.groups, t.mask)); }},
      {"drgrpo", [](O, T t) { return no_returns(grpo(t.scores, t.groups, t.mask, {.by_std = false})); }},
      {"grpo_pass_at_k", [](O, T t) { return no_returns(grpo_pass_at_k(t.scores, t.groups, t.mask)); }},
      {"gdpo", [](O o, T t) { return no_returns(gdpo(t.parts, t.groups, t.mask, o.gdpo_weights)); }},
      {"rloo", [](O, T t) { return no_returns(rloo(t.scores, t.groups, t.mask)); }},
      {"opo", [](O, T t) { return no_returns(opo(t.scores, t.groups, t.mask)); }},
      {"remax", [](O, T t) { return remax(t.rewards, t.greedy_scores, t.mask); }},
      {"reinforce_plus_plus", [](O o, T t) { return reinforce_plus_plus(t.rewards, t.mask, o.gamma); }},
      {"reinforce_plus_plus_baseline", [](O, T t) { return no_returns(reinforce_plus_plus_baseline(t.scores, t.groups, t.mask)); }},
      {"gpg", [](O, T t) { return no_returns(gpg(t.scores, t.groups, t.mask)); }},
      {"optimal_token_baseline",
       [](O, T t) { return optimal_token_baseline(t.rewards, t.logp, t.sum_squares, t.groups, t.mask, t.weights); }},
  };
  return all;
}

inline PolicyLoss dppo_by(const Options& o, const PolicyTerms& t, const Normalization& by, uint64_t) {
  using Divergence = DppoOptions::Divergence;
  const auto divergence = o.dppo_divergence == "binary_kl" ? Divergence::binary_kl : Divergence::total_variation;
  return dppo_loss(t, by, {.divergence = divergence, .low = o.clip_low, .high = o.clip_high, .max_ratio = o.dppo_max_ratio});
}

inline PolicyLoss clip_cov_by(const Options& o, const PolicyTerms& t, const Normalization& by, uint64_t seed) {
  ClipCovOptions options{.clip_low = o.clip_low, .clip_high = o.clip_high, .share = o.cov_share};
  options.least = o.clip_cov_least, options.most = o.clip_cov_most, options.seed = seed;
  return clip_cov_loss(t, by, options);
}

inline const std::map<std::string, LossBy>& losses_by_name() {
  using O = const Options&;
  using T = const PolicyTerms&;
  using N = const Normalization&;
  static const std::map<std::string, LossBy> all{
      {"ppo", [](O o, T t, N by,
                 uint64_t) { return ppo_loss(t, by, {.clip_low = o.clip_low, .clip_high = o.clip_high, .dual_clip = o.dual_clip}); }},
      {"gspo", [](O o, T t, N by, uint64_t) { return gspo_loss(t, by, {.clip_low = o.clip_low, .clip_high = o.clip_high}); }},
      {"cispo", [](O o, T t, N by, uint64_t) { return cispo_loss(t, by, {.clip_low = o.clip_low, .clip_high = o.clip_high}); }},
      {"sapo",
       [](O o, T t, N by, uint64_t) { return sapo_loss(t, by, {.tau_positive = o.sapo_tau, .tau_negative = o.sapo_tau_negative}); }},
      {"gmpo", [](O o, T t, N by, uint64_t) { return gmpo_loss(t, by, {.clip_low = o.clip_low, .clip_high = o.clip_high}); }},
      {"gpg", [](O, T t, N by, uint64_t) { return gpg_loss(t, by); }},
      {"dro", [](O o, T t, N by, uint64_t) { return dro_loss(t, by, o.dro_beta); }},
      {"dppo", dppo_by},
      {"clip_cov", clip_cov_by},
      {"kl_cov", [](O o, T t, N by, uint64_t) { return kl_cov_loss(t, by, {.share = o.cov_share, .kl = o.kl_cov_weight}); }},
  };
  return all;
}

}  // namespace detail

inline Advantages advantages_by(const Options& o, const AdvantageTerms& terms) {
  detail::check_name("advantage", o.advantage, detail::names_of(advantage_kinds()));
  return detail::advantages_by_name().at(o.advantage)(o, terms);
}

inline PolicyLoss policy_loss_by(const Options& o, const PolicyTerms& terms, const Normalization& by, uint64_t seed) {
  detail::check_name("loss", o.loss, detail::names_of(loss_kinds()));
  return detail::losses_by_name().at(o.loss)(o, terms, by, seed);
}

inline at::Tensor correction_weights(const Options& o, const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask) {
  if (o.correction == "none") return {};
  const auto level = o.correction == "token" ? Level::token : Level::sequence;
  return importance_weights(old_logp, rollout_logp, mask, {.level = level, .upper = o.correction_upper});
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
