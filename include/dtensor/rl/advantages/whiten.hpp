// Numbers of a batch's tokens with mean 0 and variance 1.
#pragma once

#include <dtensor/rl/inputs.hpp>

#include <algorithm>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// (x - mean) / sqrt(var + 1e-8) over all tokens whose mask is not 0, with the unbiased variance; 0 elsewhere. `x` and `mask` [batch, time]
// are the whole batch: the mean of a part is another one. A single token becomes 0 (verl warns or throws). In float64 inside. Without
// gradient. On DTensors communicates three numbers. Throws for other shapes and for a batch without tokens.
at::Tensor whiten(const at::Tensor& x, const at::Tensor& mask);

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor whiten(const at::Tensor& x, const at::Tensor& mask) {
  const at::NoGradGuard no_grad;
  detail::check_tokens("rl::whiten", "values", x);
  detail::check_alike("rl::whiten", "the mask", mask, "values", x);
  const auto held = detail::held(mask);
  const auto count = full_tensor(held.sum()).item<int64_t>();
  require(count > 0, "rl::whiten", "the mask {} has no token; hint: the batch may be empty after filtering", detail::shape_of(mask));
  const auto values = detail::only(x.detach(), held).to(at::kDouble);
  const auto away = detail::only(values - values.sum().div(static_cast<double>(count)), held);
  const auto variance = away.square().sum().div(static_cast<double>(std::max<int64_t>(count - 1, 1)));
  return (away * variance.add(1e-8).rsqrt()).to(x.scalar_type());
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
