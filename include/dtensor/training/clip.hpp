// The norm of all gradients together, in one collective whatever their layouts; and clipping by it.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/spread.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// The norm of the gradients of `parameters` as if they were one vector: (sum |g|^p)^(1/p), or the largest |g| for an infinite `norm_type`.
// Every rank gets the same value, which is that of one device. Without any gradient it is 0.
//
// Parameters may be plain tensors (which count as equal on all ranks) and DTensors under any placements, mixed. Their meshes may differ if
// one holds the others. Parameters without a gradient are skipped, and one that is listed twice counts once.
//
// Reduces Partial gradients first, as sync_gradients() does. Then communicates 8 bytes per rank: one all_reduce over the mesh dimensions
// along which any gradient is sharded, none when none is. (Meshes of which none holds the other reduce one after the other.)
//
// Adds half-precision gradients up in float32. Throws for a `norm_type` that is not positive, undefined parameters, sparse gradients, and
// gradients on several devices.
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2);

// Clips: multiplies the gradients by min(1, max_norm / (norm + 1e-6)), in place, and returns the norm before. Communicates what grad_norm()
// does. With an infinite max_norm it only measures. If the norm is not finite, the factor is 0 or NaN, as in
// torch::nn::utils::clip_grad_norm_; with `error_if_nonfinite` it throws instead, and the gradients stay. Throws also for a negative
// max_norm.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2, bool error_if_nonfinite = false);

// The same with a norm that is known already. Example: the norm over all stages of a pipeline, of which this rank has one. Communicates
// nothing.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kClip = "clip_grad_norm_";

inline at::Tensor norm_of_part(const at::Tensor& gradient, double p) {
  const auto part = dtensor::detail::plain_local(gradient);
  if (part.numel() == 0) return at::zeros({}, part.options().dtype(at::kDouble));
  c10::optional<at::ScalarType> sum_in;
  if (part.scalar_type() == at::kHalf || part.scalar_type() == at::kBFloat16) sum_in = at::kFloat;
  return at::linalg_vector_norm(part, p, {}, false, sum_in);
}

// Of this rank's shards, the p-th power of each member's norm, or the norm if p is infinite: [members], double.
inline at::Tensor own_powers(const Spread& spread, const std::vector<at::Tensor>& gradients, double p) {
  std::vector<at::Tensor> norms;
  for (const auto member : spread.members) norms.push_back(norm_of_part(gradients[member], p));
  const bool alike = std::ranges::all_of(norms, [&](const at::Tensor& norm) { return norm.scalar_type() == norms[0].scalar_type(); });
  for (auto& norm : norms) {  // one by one where it matters: of many numbers at once, powers may differ in the last place
    if (!alike || p != 2) norm = norm.to(at::kDouble);
    if (p != 2 && !std::isinf(p)) norm = norm.pow(p);
  }
  const auto all = at::stack(norms).to(at::kDouble);
  if (std::isinf(p)) return all;
  return (p == 2 ? all.square() : all).mul(at::tensor(spread.weights, at::kDouble).to(all.device()));
}

// The same of the whole tensors.
inline at::Tensor powers_of(const Spread& spread, const std::vector<at::Tensor>& gradients, double p) {
  const auto own = own_powers(spread, gradients, p);
  return spread.group ? spread.group->all_reduce(own, std::isinf(p) ? ReduceOp::max : ReduceOp::sum).get() : own;
}

// The sum of the p-th powers of the members, or the largest: [1], double.
inline at::Tensor sum_of_powers(const Spread& spread, const std::vector<at::Tensor>& gradients, double p) {
  const auto all = own_powers(spread, gradients, p);
  const auto own = (std::isinf(p) ? all.max() : all.sum()).reshape({1});
  return spread.group ? spread.group->all_reduce(own, std::isinf(p) ? ReduceOp::max : ReduceOp::sum).get() : own;
}

inline double norm_of(const std::vector<at::Tensor>& gradients, double p) {
  require(p > 0, kClip, "got a norm of type {}; expected a positive number, or infinity", p);
  NoSpmd plain;
  at::NoGradGuard no_grad;
  double total = 0;
  for (const auto& spread : spread_of(gradients)) {
    const auto value = sum_of_powers(spread, gradients, p).item<double>();
    total = !std::isinf(p) ? total + value : value > total || std::isnan(value) ? value : total;
  }
  return std::isinf(p) ? total : std::pow(total, 1 / p);
}

inline void scale_to_norm(const std::vector<at::Tensor>& gradients, double max_norm, double norm) {
  require(max_norm >= 0, kClip, "got max_norm {}; expected a number that is not negative", max_norm);
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return;
  at::NoGradGuard no_grad;
  for (const auto& gradient : gradients) gradient.mul_(factor);
}

}  // namespace detail

inline double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  return detail::norm_of(detail::gradients_of(detail::kClip, parameters), norm_type);
}

inline double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  require(max_norm >= 0, detail::kClip, "got max_norm {}; expected a number that is not negative", max_norm);
  const auto gradients = detail::gradients_of(detail::kClip, parameters);
  const double norm = detail::norm_of(gradients, norm_type);
  require(!error_if_nonfinite || std::isfinite(norm), detail::kClip,
          "the norm of the gradients is {}; expected a finite one; hint: with error_if_nonfinite = false they are multiplied all the same",
          norm);
  detail::scale_to_norm(gradients, max_norm, norm);
  return norm;
}

inline void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm) {
  detail::scale_to_norm(detail::gradients_of(detail::kClip, parameters), max_norm, norm);
}

}  // namespace dtensor

#pragma GCC visibility pop
