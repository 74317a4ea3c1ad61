// Losses that keep the experts of a model equally busy, and their routers' logits small. All are of the global batch: on a mesh they are
// the numbers of one device.
#pragma once

#include <dtensor/collectives/pending.hpp>

#include <ATen/ATen.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// How many tokens chose each expert: `chosen` int64 [..., k], -1: none, `scores` [..., experts] -> [experts], int64; with `per_sequence`
// [batch, experts], one row for each index of the first dim.
at::Tensor tokens_per_expert(const at::Tensor& chosen, const at::Tensor& scores, bool per_sequence = false);

// E sum_e f_e P_e (Fedus et al., "Switch Transformers", 2021, eq. 4): f_e = counts / (k tokens), P_e = the mean of the scores, which are
// taken as parts of a token's sum. 1 when all experts are equally busy. `counts` are those of tokens_per_expert, possibly of more tokens
// than those of `scores`; with [batch, experts] the mean of the sequences' losses (DeepSeek-V3, eq. 17).
at::Tensor balance_loss(const at::Tensor& scores, const at::Tensor& counts);

// The mean of logsumexp(logits)^2 (Zoph et al., "ST-MoE", 2022, eq. 5).
at::Tensor z_loss(const at::Tensor& logits);

// y, whose backward pass adds `scale` times the gradient of `loss`, a scalar. So a layer's loss needs no way out of the model, also in a
// pipeline or where activations are computed again.
at::Tensor with_loss(const at::Tensor& y, const at::Tensor& loss, double scale);

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor tokens_per_expert(const at::Tensor& chosen, const at::Tensor& scores, bool per_sequence) {
  const auto experts = scores.size(-1);
  const auto none_or_expert = at::cat({scores.detach().narrow(-1, 0, 1), scores.detach()}, -1);
  const auto marks = at::zeros_like(none_or_expert, scores.options().dtype(at::kLong)).scatter(-1, chosen + 1, 1).narrow(-1, 1, experts);
  return per_sequence ? marks.reshape({scores.size(0), -1, experts}).sum(1) : marks.reshape({-1, experts}).sum(0);
}

inline at::Tensor balance_loss(const at::Tensor& scores, const at::Tensor& counts) {
  const auto parts = scores / scores.sum(-1, /*keepdim=*/true);
  const auto experts = scores.size(-1);
  const auto mean = counts.dim() == 2 ? parts.reshape({scores.size(0), -1, experts}).mean(1) : parts.reshape({-1, experts}).mean(0);
  const auto chosen = counts.to(scores.scalar_type());
  const auto fractions = chosen / chosen.sum(-1, /*keepdim=*/true);
  return (fractions * mean).sum(-1).mean() * static_cast<double>(experts);
}

inline at::Tensor z_loss(const at::Tensor& logits) { return logits.logsumexp(-1).square().mean(); }

inline at::Tensor with_loss(const at::Tensor& y, const at::Tensor& loss, double scale) {
  return dtensor::detail::linear_map({y.detach()}, {y, loss}, [scale, loss = loss.detach()](const TensorVector& gradients) {
    return TensorVector{gradients[0], at::full_like(loss, scale)};
  })[0];
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
