// Rollout correction: answers were written by a policy (or by kernels) other than the one that ratios refer to.
//
//   const auto weights = rl::importance_weights(old_logp, rollout_logp, mask, {.level = rl::Level::token, .upper = 2});
//   const auto kept = rl::kept_tokens(old_logp, rollout_logp, mask, {{rl::Statistic::k3, rl::Over::token, 0, 0.1}});
//   auto policy = rl::ppo_loss({logp, old_logp, advantages, kept, weights}, {.counts = rl::count(mask)});
//
// Denominators after rejection. A loss divides by the counts that it is given. rl::count(mask), as here: rejected tokens count as tokens of
// loss 0, so the step gets shorter as more is rejected, and counts are known before the first microbatch (AReaL). rl::count(kept): a mean
// over what is left (verl). With sequence_mean_token_mean, each sequence's own mean is over the mask that the loss gets; to keep its
// original length too, give the loss the original mask, and weights that are 0 where `kept` is not: weights * kept.
//
// In the formulas d = old_logp - rollout_logp and rho = exp(d), d clamped to [-20, 20]. Tensors are [batch, time], plain or DTensors on one
// mesh; results have no gradient. All throw for other shapes and for options that make no sense.
#pragma once

#include <dtensor/rl/aggregate.hpp>
#include <dtensor/rl/kl.hpp>

#include <ATen/ops/where.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

enum class Level {
  token,         // rho of each token
  sequence,      // product of a sequence's tokens, at each of them
  sequence_mean  // geometric mean of them
};

struct ImportanceOptions {
  Level level = Level::token;
  double upper = 2;        // larger weights become this one (TIS: truncated importance sampling)
  double lower = 0;        // above 0: weights outside of [lower, upper] become 0, the mask stays (IcePop)
  bool normalize = false;  // divide by the mean weight of all tokens (of all sequences, for the other levels) of the batch
};

// [batch, time] in the dtype of old_logp; 0 where masked. Only `normalize` communicates, and needs the whole batch.
at::Tensor importance_weights(const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask,
                              const ImportanceOptions& options = {});

enum class Statistic {
  k1,  // rho itself, to be within [lower, upper]
  k2,  // d^2 / 2, at most upper
  k3   // rho - 1 - d, at most upper
};
enum class Over { token, sequence_sum, sequence_mean, sequence_max };  // of k1, a product and a geometric mean; no maximum

struct Rejection {
  Statistic statistic = Statistic::k1;
  Over over = Over::token;
  double lower = 0;  // of k1
  double upper = 2;
};

// The tokens whose mask is not 0 and which no rejection rejects: bool [batch, time]. A sequence is rejected whole. Communicates nothing
// where only the batch is sharded. (verl bounds 1 / rho for k1; with upper = 1 / lower that is the same.)
at::Tensor kept_tokens(const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask,
                       const std::vector<Rejection>& rejections);

// How far apart the two are: 0-dim, without gradient. They add up over microbatches, being sums divided by global counts.
struct Mismatch {
  at::Tensor kl;                     // mean over tokens of -d: KL(rollout || old)
  at::Tensor k3;                     // the same by rho - 1 - d
  at::Tensor ratio_square;           // mean over tokens of rho^2; minus 1 it is the chi-square divergence
  at::Tensor sequence_ratio_square;  // mean over sequences of the square of the product, whose logarithm is clamped to [-20, 20]
  at::Tensor log_ppl_difference;     // mean over sequences of their mean of -d, which is the difference of the logarithms of perplexities
};
Mismatch mismatch(const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask, const Counts& counts);

// (sum w)^2 / (n sum w^2) over the n tokens: 1 where all weights are equal. Of the whole batch. 0 when all weights are.
double effective_sample_size(const at::Tensor& weights, const at::Tensor& mask);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// d where the mask holds, 0 elsewhere.
inline at::Tensor log_weights(const char* tag, const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask) {
  check_tokens(tag, "old_logp", old_logp);
  check_alike(tag, "rollout_logp", rollout_logp, "old_logp", old_logp);
  check_alike(tag, "the mask", mask, "old_logp", old_logp);
  return only(old_logp.detach() - rollout_logp.detach(), held(mask));
}

inline at::Tensor safe(const at::Tensor& d) { return d.clamp(-kMostLogRatio, kMostLogRatio); }

inline at::Tensor mean_over(const at::Tensor& x, const at::Tensor& held) {
  return x.sum(1).div(held.sum(1).clamp_min(1).to(x.scalar_type()));
}

inline at::Tensor mean_weight(const at::Tensor& weights, const at::Tensor& held, Level level) {
  if (level == Level::token) return weights.sum().div(held.sum().clamp_min(1).to(weights.scalar_type()));
  return mean_over(weights, held).sum().div(held.any(1).sum().clamp_min(1).to(weights.scalar_type()));
}

// bool [batch, 1] or [batch, time].
inline at::Tensor within(const at::Tensor& d, const at::Tensor& held, const Rejection& r) {
  const auto clamped = safe(d);
  const auto token = r.statistic == Statistic::k1   ? clamped
                     : r.statistic == Statistic::k2 ? clamped.square().mul(0.5)
                                                    : only(clamped.expm1().sub(clamped), held);
  auto value = token;
  if (r.over == Over::sequence_sum) value = token.sum(1).unsqueeze(1);
  if (r.over == Over::sequence_mean) value = mean_over(token, held).unsqueeze(1);
  if (r.over == Over::sequence_max) value = token.amax(1).unsqueeze(1);  // k2 and k3 are 0 where masked, and not below
  if (r.statistic != Statistic::k1) return value.le(r.upper);
  return value.ge(std::log(r.lower)).logical_and(value.le(std::log(r.upper)));
}

}  // namespace detail

inline at::Tensor importance_weights(const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask,
                                     const ImportanceOptions& options) {
  const at::NoGradGuard no_grad;
  const auto* tag = "rl::importance_weights";
  require(options.upper > 0 && options.lower >= 0 && options.lower < options.upper, tag,
          "got bounds {} and {}; expected 0 or more, and a larger number", options.lower, options.upper);
  const auto d = detail::log_weights(tag, old_logp, rollout_logp, mask);
  const auto held = detail::held(mask);
  auto weights = d;
  if (options.level == Level::sequence) weights = d.sum(1).unsqueeze(1).expand_as(d);
  if (options.level == Level::sequence_mean) weights = detail::mean_over(d, held).unsqueeze(1).expand_as(d);
  weights = detail::only(detail::safe(weights).exp(), held);
  if (options.lower > 0) {
    weights = weights.masked_fill(weights.lt(options.lower).logical_or(weights.gt(options.upper)), 0);
  } else {
    weights = weights.clamp_max(options.upper);
  }
  if (!options.normalize) return weights;
  const auto mean = detail::mean_weight(weights, held, options.level);
  return weights / mean.masked_fill(mean.le(1e-8), 1);
}

inline at::Tensor kept_tokens(const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask,
                              const std::vector<Rejection>& rejections) {
  const at::NoGradGuard no_grad;
  const auto* tag = "rl::kept_tokens";
  const auto d = detail::log_weights(tag, old_logp, rollout_logp, mask);
  const auto held = detail::held(mask);
  auto kept = held;
  for (const auto& rejection : rejections) {
    const bool is_k1 = rejection.statistic == Statistic::k1;
    require(rejection.upper > 0 && (!is_k1 || (rejection.lower >= 0 && rejection.lower < rejection.upper)), tag,
            "got bounds {} and {}; expected 0 or more, and a larger number", rejection.lower, rejection.upper);
    require(!is_k1 || rejection.over != Over::sequence_max, tag, "k1 has no maximum over a sequence, having both signs; hint: k2 or k3");
    kept = kept.logical_and(detail::within(d, held, rejection));
  }
  return kept;
}

inline Mismatch mismatch(const at::Tensor& old_logp, const at::Tensor& rollout_logp, const at::Tensor& mask, const Counts& counts) {
  const at::NoGradGuard no_grad;
  const auto d = detail::log_weights("rl::mismatch", old_logp, rollout_logp, mask);
  detail::check_counts("rl::mismatch", {counts});
  const auto held = detail::held(mask);
  const auto clamped = detail::safe(d);
  const auto over_tokens = [&](const at::Tensor& x) { return detail::only(x, held).sum().div(static_cast<double>(counts.tokens)); };
  const auto over_sequences = [&](const at::Tensor& x) {
    return detail::only(x, held.any(1)).sum().div(static_cast<double>(counts.sequences));
  };
  return {over_tokens(d.neg()), over_tokens(clamped.expm1().sub(clamped)), over_tokens(clamped.mul(2).exp()),
          over_sequences(detail::safe(d.sum(1)).mul(2).exp()), over_sequences(detail::mean_over(d, held).neg())};
}

inline double effective_sample_size(const at::Tensor& weights, const at::Tensor& mask) {
  const at::NoGradGuard no_grad;
  const auto* tag = "rl::effective_sample_size";
  detail::check_tokens(tag, "weights", weights);
  detail::check_alike(tag, "the mask", mask, "weights", weights);
  const auto held = detail::held(mask);
  const auto w = detail::only(weights.detach(), held).to(at::kDouble);
  const auto sum = full_tensor(w.sum()).item<double>(), squares = full_tensor(w.square().sum()).item<double>();
  const auto tokens = full_tensor(held.sum()).item<int64_t>();
  require(tokens > 0, tag, "the mask {} has no token", detail::shape_of(mask));
  return squares > 0 ? sum * sum / (static_cast<double>(tokens) * squares) : 0;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
