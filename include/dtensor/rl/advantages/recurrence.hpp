// Linear recurrences along time, backwards, without a loop over time: log2(time) steps over whole tensors.
#pragma once

#include <dtensor/rl/inputs.hpp>

#include <ATen/ops/constant_pad_nd.h>

#pragma GCC visibility push(default)

namespace dtensor::rl::detail {

// x[:, t] = y[:, t + by], and 0 behind the end; for a negative `by` before the start.
inline at::Tensor ahead(const at::Tensor& y, int64_t by) {
  const auto time = y.size(1);
  if (by == 0) return y;
  if (std::abs(by) >= time) return y.mul(0);
  return by > 0 ? at::constant_pad_nd(y.narrow(1, by, time - by), {0, by}) : at::constant_pad_nd(y.narrow(1, 0, time + by), {-by, 0});
}

// x_t = b_t + a_t x_{t+1}, with 0 behind the end: the composition of affine functions is associative, so spans double in length
// (Hillis and Steele, "Data Parallel Algorithms", 1986). a, b, x: [batch, time].
inline at::Tensor recur_back(at::Tensor a, at::Tensor b) {
  for (int64_t span = 1; span < b.size(1); span *= 2) {
    b = b.add(a.mul(ahead(b, span)));
    if (2 * span < b.size(1)) a = a.mul(ahead(a, span));
  }
  return b;
}

// x_t = b_t + a_t x_{t-1}.
inline at::Tensor recur(const at::Tensor& a, const at::Tensor& b) { return recur_back(a.flip({1}), b.flip({1})).flip({1}); }

// At each position the value at the next one that is `held`, itself included; 0 where none follows.
inline at::Tensor next_held(const at::Tensor& value, const at::Tensor& held) {
  const auto is = held.to(value.scalar_type());
  return recur_back(is.neg().add(1), value.mul(is));
}

// The last one before, itself included.
inline at::Tensor last_held(const at::Tensor& value, const at::Tensor& held) {
  const auto is = held.to(value.scalar_type());
  return recur(is.neg().add(1), value.mul(is));
}

}  // namespace dtensor::rl::detail

#pragma GCC visibility pop
