// Estimates of the divergence of a policy from a reference, in the reward or in the loss, and coefficients for them.
//
//   auto kl = rl::kl_estimate(logp, reference, rl::Kl::k3_through);              // [batch, time]
//   auto loss = policy.loss + beta.value() * rl::aggregate(kl, mask, by);        // in the loss: k2, or a straight-through form
//   rewards = rl::rewards_with_kl(rewards, kl, mask, beta.value());              // or in the reward
#pragma once

#include <dtensor/rl/aggregate.hpp>

#include <algorithm>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// With D = logp - reference (Schulman, "Approximating KL Divergence", 2020). In expectation over the policy's own tokens, k1 and k3 have
// the value of the divergence but not its gradient (that of k1 is 0), k2 has its gradient. The straight-through forms have the value of one
// and the gradient of k2.
enum class Kl {
  k1,          // D
  magnitude,   // |D|
  k2,          // D^2 / 2
  k3,          // exp(-D) - 1 + D, with D clamped to [-20, 20] and the result to at most 10
  k1_through,  // value of k1, gradient of k2
  k3_through   // value of k3, gradient of k2
};

// [batch, time] from log-probabilities [batch, time] of the chosen tokens, in their dtype. `reference` has no gradient. Communicates
// nothing. Throws for other shapes.
at::Tensor kl_estimate(const at::Tensor& logp, const at::Tensor& reference, Kl form);

// Rewards [batch, time] - beta * kl where the mask holds, and 0 elsewhere. Without gradient. Throws for other shapes.
at::Tensor rewards_with_kl(const at::Tensor& rewards, const at::Tensor& kl, const at::Tensor& mask, double beta);

// What a controller is told: the mean over sequences of their mean over tokens, of the whole batch. `counts` is rl::count(mask).
// Communicates one number when `kl` is sharded.
double mean_kl(const at::Tensor& kl, const at::Tensor& mask, const Counts& counts);

// A coefficient that stays, or that follows the divergence (Ziegler et al., arXiv 1909.08593):
// beta *= 1 + clip(kl / target - 1, -0.2, 0.2) * steps / horizon, and by 0.1 where that is less: at 0 it would stay there
class KlCoefficient {
 public:
  // Throws for a negative number.
  explicit KlCoefficient(double beta) : beta_(beta) { check(); }
  // Throws also for a target or a horizon that is not positive.
  KlCoefficient(double beta, double target, double horizon);

  double value() const { return beta_; }
  // `steps` are in the unit of `horizon`: sequences, say. Throws for a divergence that is NaN.
  void update(double kl, double steps);

 private:
  void check() const { require(beta_ >= 0 && std::isfinite(beta_), "rl::KlCoefficient", "got {}; expected 0 or more", beta_); }

  double beta_, target_ = 0, horizon_ = 0;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// exp() of it is finite, and its square in float32 too.
inline constexpr double kMostLogRatio = 20;
inline constexpr double kMostK3 = 10;

inline at::Tensor k3_of(const at::Tensor& d) {
  const auto clamped = d.clamp(-kMostLogRatio, kMostLogRatio);
  return clamped.neg().expm1().add(clamped).clamp_max(kMostK3);
}

}  // namespace detail

inline at::Tensor kl_estimate(const at::Tensor& logp, const at::Tensor& reference, Kl form) {
  detail::check_tokens("rl::kl_estimate", "logp", logp);
  detail::check_alike("rl::kl_estimate", "the reference", reference, "logp", logp);
  const auto d = logp - reference.detach();
  const auto through = [&](const at::Tensor& value) {
    const auto k2 = d.square().mul(0.5);
    return k2 - k2.detach() + value.detach();
  };
  switch (form) {
    case Kl::k1: return d;
    case Kl::magnitude: return d.abs();
    case Kl::k2: return d.square().mul(0.5);
    case Kl::k3: return detail::k3_of(d);
    case Kl::k1_through: return through(d);
    case Kl::k3_through: return through(detail::k3_of(d));
  }
  fail("rl::kl_estimate", "got form {}; expected one of rl::Kl", static_cast<int>(form));
}

inline at::Tensor rewards_with_kl(const at::Tensor& rewards, const at::Tensor& kl, const at::Tensor& mask, double beta) {
  detail::check_tokens("rl::rewards_with_kl", "rewards", rewards);
  detail::check_alike("rl::rewards_with_kl", "kl", kl, "rewards", rewards);
  detail::check_alike("rl::rewards_with_kl", "the mask", mask, "rewards", rewards);
  return detail::only(rewards.detach() - kl.detach() * beta, detail::held(mask));
}

inline double mean_kl(const at::Tensor& kl, const at::Tensor& mask, const Counts& counts) {
  const at::NoGradGuard no_grad;
  return full_tensor(aggregate(kl.detach(), mask, {counts, Aggregation::sequence_mean_token_mean})).item<double>();
}

inline KlCoefficient::KlCoefficient(double beta, double target, double horizon) : beta_(beta), target_(target), horizon_(horizon) {
  check();
  require(target > 0 && horizon > 0, "rl::KlCoefficient", "got a target of {} and a horizon of {}; expected positive numbers", target,
          horizon);
}

inline void KlCoefficient::update(double kl, double steps) {
  require(!std::isnan(kl) && steps >= 0, "rl::KlCoefficient", "got a divergence of {} after {} steps; expected numbers", kl, steps);
  if (target_ > 0) beta_ *= std::max(0.1, 1 + std::clamp(kl / target_ - 1, -0.2, 0.2) * steps / horizon_);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
