// The rows that experts compute: a token's row for each expert that it chose, sorted by expert and, within an expert, in the order of
// tokens.
#pragma once

#include <dtensor/collectives/pending.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::expert {

struct Rows {
  at::Tensor slots;             // int64 [rows]: token * k + choice
  at::Tensor tokens;            // int64 [rows]
  at::Tensor experts;           // int64 [rows], ascending
  std::vector<int64_t> counts;  // of each expert
  int64_t choices = 0;          // k
};

// `chosen`, int64 [tokens, k], plain: the experts of each token; -1: none. Ties and equal experts keep the order of tokens.
Rows sorted_rows(const at::Tensor& chosen, int64_t experts);

// So many rows of tensors without values (of the meta device, for dry runs), the same number for all experts.
Rows even_rows(const at::Tensor& chosen, int64_t experts, int64_t rows);

// x [tokens, dim] -> [rows, dim].
at::Tensor take_rows(const at::Tensor& x, const Rows& rows);

// The sum of each token's rows, weighted: `computed` [rows, dim], `weights` [tokens, k] -> [tokens, dim], in the dtype of `computed`. Sums
// are in float32 at least, and in the order of the token's choices, whoever computed the rows.
at::Tensor weighted_sums(const at::Tensor& computed, const at::Tensor& weights, const Rows& rows);

// -- How ------------------------------------------------------------------------------------------------------------------

inline std::vector<int64_t> numbers_of(const at::Tensor& x) {
  const auto here = x.to(at::kCPU, at::kLong).contiguous();
  return {here.data_ptr<int64_t>(), here.data_ptr<int64_t>() + here.numel()};
}

// Of `whole` things, those of part i where parts are as equal as can be.
inline int64_t even_share(int64_t whole, int64_t i, int64_t parts) { return whole / parts + (i < whole % parts ? 1 : 0); }

inline Rows even_rows(const at::Tensor& chosen, int64_t experts, int64_t rows) {
  const auto some = at::empty({rows}, chosen.options());
  Rows result{some, some, some, {}, chosen.size(1)};
  for (int64_t e = 0; e < experts; ++e) result.counts.push_back(even_share(rows, e, experts));
  return result;
}

inline Rows sorted_rows(const at::Tensor& chosen, int64_t experts) {
  if (chosen.is_meta()) return even_rows(chosen, experts, chosen.numel());
  auto [sorted, slots] = at::sort(chosen.reshape({-1}), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  // Of none, of each expert, and of those that there are not.
  const auto counts = numbers_of(at::bincount(sorted.clamp(-1, experts).add(1), {}, experts + 2));
  require(counts.back() == 0 && (sorted.numel() == 0 || sorted[0].item<int64_t>() >= -1), "mix_experts",
          "a token chose an expert that there is not; expected numbers below {}, or -1 for none", experts);
  const auto k = chosen.size(1), rows = sorted.numel() - counts[0];
  slots = slots.narrow(0, counts[0], rows);
  return {slots, slots.div(k, "floor"), sorted.narrow(0, counts[0], rows), {counts.begin() + 1, counts.end() - 1}, k};
}

// [rows, dim] -> [tokens, dim]: the sum of each token's rows. No two rows have one place, so it is the same on every device and each time.
inline at::Tensor sums_of_rows(const at::Tensor& x, const Rows& rows, int64_t tokens) {
  const auto places = at::zeros({tokens * rows.choices, x.size(1)}, x.options()).index_copy_(0, rows.slots, x);
  return places.view({tokens, rows.choices, x.size(1)}).sum(1);
}

// The same function of x, with an adjoint; both plain.
template <class Forward, class Adjoint>
at::Tensor linear(const at::Tensor& x, const Forward& forward, Adjoint adjoint) {
  const NoSpmd plain;
  const auto result = [&] {
    c10::NoGradGuard no_grad;
    return forward(x);
  }();
  return detail::linear_map({result}, {x}, [adjoint = std::move(adjoint)](const TensorVector& gradients) {
    const NoSpmd plain;
    return TensorVector{adjoint(gradients[0])};
  })[0];
}

// index_select along dim 0, also in dry runs, for which libtorch 1.13 has no such operator.
inline at::Tensor selected(const at::Tensor& x, const at::Tensor& index) {
  if (!x.is_meta()) return x.index_select(0, index);
  auto sizes = x.sizes().vec();
  sizes[0] = index.size(0);
  return at::empty(sizes, x.options());
}

inline at::Tensor take_rows(const at::Tensor& x, const Rows& rows) {
  return linear(
      x, [&](const at::Tensor& y) { return selected(y, rows.tokens); },
      [rows, tokens = x.size(0)](const at::Tensor& gradient) { return sums_of_rows(gradient, rows, tokens); });
}

inline at::Tensor weighted_sums(const at::Tensor& computed, const at::Tensor& weights, const Rows& rows) {
  const auto dtype = c10::promoteTypes(computed.scalar_type(), at::kFloat);
  const auto factors = linear(
      weights.reshape({-1}), [&](const at::Tensor& y) { return selected(y, rows.slots); },
      [slots = rows.slots, all = weights.numel()](const at::Tensor& gradient) {
        return at::zeros({all}, gradient.options()).index_copy_(0, slots, gradient);
      });
  const auto sums = linear(
      computed.to(dtype).mul(factors.to(dtype).unsqueeze(1)), [&](const at::Tensor& y) { return sums_of_rows(y, rows, weights.size(0)); },
      [tokens = rows.tokens](const at::Tensor& gradient) { return selected(gradient, tokens); });
  return sums.to(computed.scalar_type());
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
