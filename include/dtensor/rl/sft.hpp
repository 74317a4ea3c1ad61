// Learning from answers that are given, and from pairs of them.
#pragma once

#include <dtensor/rl/aggregate.hpp>

#include <ATen/ops/log_sigmoid.h>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Supervised fine-tuning: -logp, aggregated. `logp` and `mask` [batch, time]; prompts have a mask of 0. As aggregate() in all else.
at::Tensor sft_loss(const at::Tensor& logp, const at::Tensor& mask, const Normalization& by);

// [batch]: the log-probability of each answer, summed over its tokens. Differentiable.
at::Tensor sequence_logp(const at::Tensor& logp, const at::Tensor& mask);

struct DpoOptions {
  double beta = 0.1;
  double label_smoothing = 0;  // the share of pairs that may be the wrong way round (conservative DPO; Mitchell, 2023)
};

// `loss` and the metrics are 0-dim and add up over microbatches; metrics have no gradient.
struct DpoLoss {
  at::Tensor loss;
  at::Tensor accuracy;       // pairs whose chosen answer has the larger reward
  at::Tensor chosen_reward;  // mean of beta (log pi - log ref)
  at::Tensor rejected_reward;
};

// Direct preference optimization (Rafailov et al., arXiv 2305.18290, eq. 7): with h = beta ((c - c') - (r - r')),
// -(1 - s) log sigmoid(h) - s log sigmoid(-h), averaged over `pairs`, the number of pairs of the whole batch. c and r are sequence_logp()
// [pairs of this call] of the chosen and the rejected answers under the policy, c' and r' under the reference, which has no gradient.
// Throws for other shapes, and for options that make no sense.
DpoLoss dpo_loss(const at::Tensor& chosen, const at::Tensor& rejected, const at::Tensor& chosen_reference,
                 const at::Tensor& rejected_reference, int64_t pairs, const DpoOptions& options = {});

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor sft_loss(const at::Tensor& logp, const at::Tensor& mask, const Normalization& by) {
  return aggregate(logp.neg(), mask, by);
}

inline at::Tensor sequence_logp(const at::Tensor& logp, const at::Tensor& mask) {
  detail::check_tokens("rl::sequence_logp", "logp", logp);
  detail::check_alike("rl::sequence_logp", "the mask", mask, "logp", logp);
  return detail::only(logp, detail::held(mask)).sum(1);
}

inline DpoLoss dpo_loss(const at::Tensor& chosen, const at::Tensor& rejected, const at::Tensor& chosen_reference,
                        const at::Tensor& rejected_reference, int64_t pairs, const DpoOptions& options) {
  const auto* tag = "rl::dpo_loss";
  require(chosen.defined() && chosen.dim() == 1 && chosen.is_floating_point(), tag, "got {} for the chosen answers; expected [pairs]",
          detail::shape_of(chosen));
  detail::check_alike(tag, "the rejected answers", rejected, "the chosen", chosen);
  detail::check_alike(tag, "chosen_reference", chosen_reference, "the chosen", chosen);
  detail::check_alike(tag, "rejected_reference", rejected_reference, "the chosen", chosen);
  require(pairs > 0, tag, "got {} pairs in the whole batch beside {} here; expected a positive number", pairs, detail::shape_of(chosen));
  require(options.beta > 0 && options.label_smoothing >= 0 && options.label_smoothing < 0.5, tag,
          "got a beta of {} and a label_smoothing of {}; expected a positive number, and 0 to 0.5", options.beta, options.label_smoothing);
  const auto mean = [&](const at::Tensor& x) { return x.sum().div(static_cast<double>(pairs)); };
  const auto won = (chosen - chosen_reference.detach()).mul(options.beta),
             lost = (rejected - rejected_reference.detach()).mul(options.beta);
  const auto margin = won - lost;
  auto losses = at::log_sigmoid(margin).mul(options.label_smoothing - 1);
  if (options.label_smoothing > 0) losses = losses - at::log_sigmoid(margin.neg()).mul(options.label_smoothing);
  return {mean(losses), mean(margin.detach().gt(0).to(chosen.scalar_type())), mean(won.detach()), mean(lost.detach())};
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
