// The loss of a critic.
#pragma once

#include <dtensor/rl/aggregate.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct ValueLoss {
  at::Tensor loss;           // 0-dim
  at::Tensor clip_fraction;  // 0-dim, without gradient: tokens where the clipped term is the larger one, of counts.tokens
};

// 1/2 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2), aggregated (Schulman et al.'s PPO code; Huang et al., "The 37 Implementation
// Details of PPO", 2022, detail 9). `values` [batch, time] get the gradient; `old_values` and `returns` [batch, time] get none. A `clip` of
// 0 is none, and `old_values` may then be undefined: the loss of value pretraining (VAPO, arXiv 2504.05118) with returns of GAE at lambda
// 1. Masks, counts, microbatches and errors as in aggregate().
ValueLoss value_loss(const at::Tensor& values, const at::Tensor& old_values, const at::Tensor& returns, const at::Tensor& mask,
                     const Normalization& by, double clip = 0.5);

// -- How ------------------------------------------------------------------------------------------------------------------

inline ValueLoss value_loss(const at::Tensor& values, const at::Tensor& old_values, const at::Tensor& returns, const at::Tensor& mask,
                            const Normalization& by, double clip) {
  const auto* tag = "rl::value_loss";
  detail::check_tokens(tag, "values", values);
  detail::check_alike(tag, "the returns", returns, "values", values);
  detail::check_alike(tag, "the mask", mask, "values", values);
  detail::check_counts(tag, by);
  require(clip >= 0, tag, "got a clip of {}; expected a positive number, or 0 for none", clip);
  const auto held = detail::held(mask);
  const auto v = detail::only(values, held), target = detail::only(returns.detach(), held);
  const auto free = (v - target).square();
  if (clip == 0) {
    const auto loss = detail::aggregate_held(free, held, by).mul(0.5);
    return {loss, loss.detach().mul(0)};
  }
  detail::check_alike(tag, "old_values", old_values, "values", values);
  const auto old = detail::only(old_values.detach(), held);
  const auto bound = (v.maximum(old - clip).minimum(old + clip) - target).square();
  const at::Tensor cut = bound.detach().gt(free.detach()).sum().to(v.scalar_type()).div(static_cast<double>(by.counts.tokens));
  return {detail::aggregate_held(free.maximum(bound), held, by).mul(0.5), cut};
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
