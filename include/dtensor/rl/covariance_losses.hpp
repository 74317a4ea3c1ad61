// Losses that spare the few tokens which would cost the policy most of its entropy: Clip-Cov and KL-Cov (arXiv 2505.22617).
//
// A token's covariance is (A - mean A) (logp - mean logp), the means over all tokens. Which tokens are chosen depends on all of them. So
// under microbatches choose once, from the whole batch, and give each loss its part; a loss without `chosen` chooses from what it is given.
#pragma once

#include <dtensor/rl/losses.hpp>
#include <dtensor/rng/random.hpp>

#include <ATen/ops/zeros.h>

#include <numeric>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct ClipCovOptions {
  double clip_low = 0.2;
  double clip_high = 0.2;
  double share = 2e-4;  // of all tokens are spared, at least one; fewer where fewer qualify
  double least = 1;     // covariances within (least, most) qualify
  double most = 5;
  uint64_t seed = 0;    // those that qualify are drawn by it; a token's number depends on its place in the batch
  at::Tensor chosen{};  // bool [batch, time]: what clip_cov_tokens() gave
};

// l = max(-A r, -A clip(r)) for all tokens but the chosen ones, which have none. Tokens that PPO clips already do not qualify.
PolicyLoss clip_cov_loss(const PolicyTerms& terms, const Normalization& by, const ClipCovOptions& options = {});
at::Tensor clip_cov_tokens(const PolicyTerms& terms, const ClipCovOptions& options = {});

struct KlCovOptions {
  double share = 2e-4;  // of all tokens, those of the largest covariance, at least one; of equal ones the first
  double kl = 1;
  at::Tensor chosen{};  // bool [batch, time]: what kl_cov_tokens() gave
};

// l = -A r, and for the chosen tokens -A r + kl |D|. The fraction in the metrics is that of chosen tokens.
PolicyLoss kl_cov_loss(const PolicyTerms& terms, const Normalization& by, const KlCovOptions& options = {});
at::Tensor kl_cov_tokens(const PolicyTerms& terms, const KlCovOptions& options = {});

// Choosing gathers three numbers for each token, so that every rank chooses as one device does. Errors as in losses.hpp.

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Plain, of the whole batch, flat: covariances, and which tokens may be chosen.
struct Covariances {
  at::Tensor values, held;
};

inline Covariances covariances_of(const HeldTerms& t) {
  const auto advantages = whole(t.advantages).to(at::kDouble), logp = whole(t.logp).to(at::kDouble), held = whole(t.held);
  const NoSpmd plain;
  const auto count = held.sum().clamp_min(1).to(at::kDouble);
  return {((advantages - advantages.sum().div(count)) * (logp - logp.sum().div(count))).reshape({-1}).cpu(), held.reshape({-1}).cpu()};
}

inline int64_t share_of(const at::Tensor& held, double share) {
  const auto tokens = static_cast<double>(held.sum().item<int64_t>());
  return std::max<int64_t>(1, static_cast<int64_t>(share * tokens));
}

// bool, like the terms: true at the `count` candidates that `before` puts first.
template <class Before>
at::Tensor first_of(std::vector<int64_t> candidates, int64_t count, const HeldTerms& t, Before before) {
  const auto most = std::min<int64_t>(count, static_cast<int64_t>(candidates.size()));
  std::ranges::partial_sort(candidates, candidates.begin() + most, before);
  candidates.resize(most);
  const NoSpmd plain;
  auto chosen = at::zeros({t.held.numel()}, at::TensorOptions(at::kBool));
  for (const auto index : candidates) chosen.data_ptr<bool>()[index] = true;
  return beside(chosen.reshape(t.held.sizes()).to(t.held.device()), t.held);
}

inline at::Tensor clip_cov_chosen(const HeldTerms& t, const at::Tensor& cut, const ClipCovOptions& o) {
  const auto [values, held] = covariances_of(t);
  const auto is_cut = whole(cut);
  const NoSpmd plain;
  const auto free = is_cut.reshape({-1}).cpu().logical_not().logical_and(held).contiguous();
  const auto* value = values.data_ptr<double>();
  std::vector<int64_t> candidates;
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (free.data_ptr<bool>()[i] && value[i] > o.least && value[i] < o.most) candidates.push_back(i);
  }
  const auto number = [&](int64_t i) { return rng::uniform_at(o.seed, 0, i); };
  return first_of(std::move(candidates), share_of(held, o.share), t, [&](int64_t a, int64_t b) {
    const auto x = number(a), y = number(b);
    return x != y ? x < y : a < b;
  });
}

inline at::Tensor kl_cov_chosen(const HeldTerms& t, const KlCovOptions& o) {
  const auto [values, held] = covariances_of(t);
  const NoSpmd plain;
  const auto* value = values.data_ptr<double>();
  const auto is_held = held.contiguous();
  std::vector<int64_t> candidates;
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (is_held.data_ptr<bool>()[i]) candidates.push_back(i);
  }
  return first_of(std::move(candidates), share_of(held, o.share), t,
                  [&](int64_t a, int64_t b) { return value[a] != value[b] ? value[a] > value[b] : a < b; });
}

inline void check_share(const char* tag, double share) {
  require(share > 0 && share <= 1, tag, "got a share of {}; expected a number above 0, up to 1", share);
}

// What choosing needs; counts do not matter to it.
inline HeldTerms for_choosing(const char* tag, const PolicyTerms& terms) {
  auto t = terms;
  t.logp = terms.logp.detach();
  return checked(tag, t, {{1, 1}});
}

inline Clipped clip_cov_surrogate(const HeldTerms& t, const ClipCovOptions& o) {
  return clipped_surrogate(t.advantages, t.log_ratio.exp(), o.clip_low, o.clip_high);
}

}  // namespace detail

inline at::Tensor clip_cov_tokens(const PolicyTerms& terms, const ClipCovOptions& options) {
  const at::NoGradGuard no_grad;
  const auto* tag = "rl::clip_cov_tokens";
  detail::check_share(tag, options.share);
  const auto t = detail::for_choosing(tag, terms);
  return detail::clip_cov_chosen(t, detail::clip_cov_surrogate(t, options).cut, options);
}

inline PolicyLoss clip_cov_loss(const PolicyTerms& terms, const Normalization& by, const ClipCovOptions& options) {
  const auto* tag = "rl::clip_cov_loss";
  detail::check_clip(tag, options.clip_low, options.clip_high);
  detail::check_share(tag, options.share);
  const auto t = detail::checked(tag, terms, by);
  const auto [losses, cut] = detail::clip_cov_surrogate(t, options);
  const auto chosen = options.chosen.defined() ? options.chosen : clip_cov_tokens(terms, options);
  detail::check_alike(tag, "the chosen tokens", chosen, "logp", terms.logp);
  return detail::finish(losses.masked_fill(chosen, 0), t, by, chosen, cut);
}

inline at::Tensor kl_cov_tokens(const PolicyTerms& terms, const KlCovOptions& options) {
  const at::NoGradGuard no_grad;
  detail::check_share("rl::kl_cov_tokens", options.share);
  return detail::kl_cov_chosen(detail::for_choosing("rl::kl_cov_tokens", terms), options);
}

inline PolicyLoss kl_cov_loss(const PolicyTerms& terms, const Normalization& by, const KlCovOptions& options) {
  const auto* tag = "rl::kl_cov_loss";
  detail::check_share(tag, options.share);
  require(options.kl >= 0, tag, "got a kl of {}; expected 0 or more", options.kl);
  const auto t = detail::checked(tag, terms, by);
  const auto chosen = options.chosen.defined() ? options.chosen : kl_cov_tokens(terms, options);
  detail::check_alike(tag, "the chosen tokens", chosen, "logp", terms.logp);
  const auto losses = t.log_ratio.abs().mul(options.kl) * chosen.to(t.logp.scalar_type()) - t.advantages * t.log_ratio.exp();
  return detail::finish(losses, t, by, chosen);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
