// What queries have seen of some keys, and how two such results become one.
#pragma once

#include <dtensor/parallel/context/block_mask.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Of queries that saw some of the keys. `out` [batch, heads, queries, dim] is the mean of their values, `lse` [batch, heads, queries] the
// logarithm of the sum of exponentiated scores. Both are float64 for float64 inputs, else float32. A query that saw no key has 0 and -inf.
struct Attended {
  at::Tensor out, lse;
};

// What both saw, of disjoint keys; in place in `all`. The order of the two does not matter, to the bit.
void merge(const Attended& all, const Attended& more);

inline at::ScalarType sums_of(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// No gradients, no distributed tensors, and the dtypes that are given.
struct Plain {
  const NoSpmd plain{};
  const at::NoGradGuard no_grad{};
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

constexpr double kNothing = -std::numeric_limits<double>::infinity();

inline Attended nothing_seen(const at::Tensor& q) {
  const auto options = q.options().dtype(sums_of(q));
  return {at::zeros(q.sizes(), options), at::full(q.sizes().slice(0, 3), kNothing, options)};
}

}  // namespace detail

inline void merge(const Attended& all, const Attended& more) {
  const detail::Plain plain;
  const auto largest = at::maximum(all.lse, more.lse);
  const auto finite = largest.masked_fill(largest.eq(detail::kNothing), 0);
  const auto first = all.lse.sub(finite).exp(), second = more.lse.sub(finite).exp(), sum = first.add(second);
  const auto whole = sum.masked_fill(sum.eq(0), 1);
  all.out.mul_(first.div(whole).unsqueeze(3)).add_(more.out.mul(second.div(whole).unsqueeze(3)));
  all.lse.copy_(finite.add(sum.log()));
}

}  // namespace dtensor::context

#pragma GCC visibility pop
