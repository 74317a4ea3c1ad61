#include <dtensor/training/clip.hpp>

#include <dtensor/tensor/spread.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

namespace dtensor {

namespace {

constexpr const char* kTag = "clip_grad_norm_";

at::Tensor local_norm(const at::Tensor& gradient, double p) {
  const auto part = detail::plain_local(gradient);
  if (part.numel() == 0) return at::zeros({}, part.options().dtype(at::kDouble));
  c10::optional<at::ScalarType> sum_in;
  if (part.scalar_type() == at::kHalf || part.scalar_type() == at::kBFloat16) sum_in = at::kFloat;
  return at::linalg_vector_norm(part, p, {}, false, sum_in).to(at::kDouble);
}

// The sum of the p-th powers of the members, or the largest: [1], double.
at::Tensor combine(const detail::Spread& spread, const std::vector<at::Tensor>& gradients, double p) {
  std::vector<at::Tensor> powers;
  for (size_t i = 0; i < spread.members.size(); ++i) {
    const auto norm = local_norm(gradients[spread.members[i]], p);
    powers.push_back(std::isinf(p) ? norm : norm.pow(p).mul(spread.weights[i]));
  }
  const auto all = at::stack(powers);
  const auto own = (std::isinf(p) ? all.max() : all.sum()).reshape({1});
  return spread.group ? spread.group->all_reduce(own, std::isinf(p) ? ReduceOp::max : ReduceOp::sum).get() : own;
}

double norm_of(const std::vector<at::Tensor>& gradients, double p) {
  require(p > 0, kTag, "got a norm of type {}; expected a positive number, or infinity", p);
  NoSpmd plain;
  at::NoGradGuard no_grad;
  double total = 0;
  for (const auto& spread : detail::spread_of(gradients)) {
    const auto value = combine(spread, gradients, p).item<double>();
    total = !std::isinf(p) ? total + value : value > total || std::isnan(value) ? value : total;
  }
  return std::isinf(p) ? total : std::pow(total, 1 / p);
}

void scale(const std::vector<at::Tensor>& gradients, double max_norm, double norm) {
  require(max_norm >= 0, kTag, "got max_norm {}; expected a number that is not negative", max_norm);
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return;
  at::NoGradGuard no_grad;
  for (const auto& gradient : gradients) gradient.mul_(factor);
}

}  // namespace

double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  return norm_of(detail::gradients_of(kTag, parameters), norm_type);
}

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  require(max_norm >= 0, kTag, "got max_norm {}; expected a number that is not negative", max_norm);
  const auto gradients = detail::gradients_of(kTag, parameters);
  const double norm = norm_of(gradients, norm_type);
  require(!error_if_nonfinite || std::isfinite(norm), kTag,
          "the norm of the gradients is {}; expected a finite one; hint: with error_if_nonfinite = false they are multiplied all the same",
          norm);
  scale(gradients, max_norm, norm);
  return norm;
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm) {
  scale(detail::gradients_of(kTag, parameters), max_norm, norm);
}

}  // namespace dtensor
