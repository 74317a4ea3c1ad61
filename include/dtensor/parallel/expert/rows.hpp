// The rows that experts compute: a token's row for each expert that it chose, sorted by expert and, within an expert, in the order of
// tokens.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/collectives/pending.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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

inline void check_chosen(bool right, int64_t experts) {
  require(right, "mix_experts", "a token chose an expert that there is not; expected numbers below {}, or -1 for none", experts);
}

// On the host, where numbers are counted faster than sorted.
inline Rows counted_rows(const at::Tensor& chosen, int64_t experts) {
  const auto all = chosen.contiguous();
  const auto* of = all.data_ptr<int64_t>();
  const auto n = all.numel(), k = chosen.size(1);
  std::vector<int64_t> counts(experts, 0), next(experts, 0);
  int64_t rows = 0;
  for (int64_t i = 0; i < n; ++i) {
    check_chosen(of[i] >= -1 && of[i] < experts, experts);
    if (of[i] >= 0) ++counts[of[i]], ++rows;
  }
  for (int64_t e = 1; e < experts; ++e) next[e] = next[e - 1] + counts[e - 1];
  const auto made = [&] { return at::empty({rows}, all.options()); };
  Rows result{made(), made(), made(), std::move(counts), k};
  auto *slots = result.slots.data_ptr<int64_t>(), *tokens = result.tokens.data_ptr<int64_t>(), *chose = result.experts.data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    if (of[i] < 0) continue;
    const auto at = next[of[i]]++;
    slots[at] = i, tokens[at] = i / k, chose[at] = of[i];
  }
  return result;
}

inline Rows sorted_rows(const at::Tensor& chosen, int64_t experts) {
  if (chosen.is_meta()) return even_rows(chosen, experts, chosen.numel());
  if (chosen.is_cpu()) return counted_rows(chosen, experts);
  auto [sorted, slots] = at::sort(chosen.reshape({-1}), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  // Of none, of each expert, and of those that there are not.
  const auto counts = numbers_of(at::bincount(sorted.clamp(-1, experts).add(1), {}, experts + 2));
  check_chosen(counts.back() == 0 && (sorted.numel() == 0 || sorted[0].item<int64_t>() >= -1), experts);
  const auto k = chosen.size(1), rows = sorted.numel() - counts[0];
  slots = slots.narrow(0, counts[0], rows);
  return {slots, slots.div(k, "floor"), sorted.narrow(0, counts[0], rows), {counts.begin() + 1, counts.end() - 1}, k};
}

// Whether loops of ours read it.
inline bool on_host(const at::Tensor& x) { return x.is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble); }

template <class F>
void with_numbers_of(const at::Tensor& x, const F& f) {
  x.scalar_type() == at::kFloat ? f(float()) : f(double());
}

// Calls f(t) for tokens on all threads of libtorch.
template <class F>
void for_each_token(int64_t tokens, int64_t numbers, const F& f) {
  at::parallel_for(0, tokens, std::max<int64_t>(1, 32768 / std::max<int64_t>(numbers, 1)), [&](int64_t begin, int64_t end) {
    for (auto t = begin; t < end; ++t) f(t);
  });
}

// [tokens * k]: which row each choice is; -1: none.
inline std::vector<int64_t> rows_of_choices(const at::Tensor& slots, int64_t choices) {
  std::vector<int64_t> result(choices, -1);
  const auto* slot = slots.data_ptr<int64_t>();
  for (int64_t i = 0; i < slots.numel(); ++i) result[slot[i]] = i;
  return result;
}

// In one pass, rows times `weights` [tokens, k], contiguous; undefined: times 1.
inline at::Tensor sums_on_host(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& slots, int64_t tokens, int64_t k) {
  const auto x = rows.contiguous(), result = at::zeros({tokens, rows.size(1)}, rows.options());
  const auto row_of = rows_of_choices(slots.contiguous(), tokens * k);
  const auto dim = rows.size(1);
  with_numbers_of(x, [&](auto one) {
    using Number = decltype(one);
    const auto* from = x.data_ptr<Number>();
    const auto* weight = weights.defined() ? weights.data_ptr<Number>() : nullptr;
    auto* to = result.data_ptr<Number>();
    for_each_token(tokens, k * dim, [&](int64_t t) {
      for (auto i = t * k; i < (t + 1) * k; ++i) {
        if (row_of[i] < 0) continue;
        const auto* row = from + row_of[i] * dim;
        const auto factor = weight ? weight[i] : Number(1);
        for (int64_t d = 0; d < dim; ++d) to[t * dim + d] += factor * row[d];
      }
    });
  });
  return result;
}

// In sums that do not wait for each other.
template <class Number>
Number product_of(const Number* a, const Number* b, int64_t length) {
  constexpr int64_t kLanes = 8;
  Number lanes[kLanes] = {}, total = 0;
  const auto even = length - length % kLanes;
  for (int64_t i = 0; i < even; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  for (auto i = even; i < length; ++i) total += a[i] * b[i];
  for (const auto lane : lanes) total += lane;
  return total;
}

// The gradients of `rows` and `weights` from that of their weighted sums.
inline TensorVector sums_backward_on_host(const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& weights,
                                          const at::Tensor& slots) {
  const auto g = gradient.contiguous(), x = rows.contiguous();
  const auto of_rows = at::empty(x.sizes(), x.options()), of_weights = at::zeros(weights.sizes(), weights.options());
  const auto k = weights.size(1), dim = x.size(1);
  const auto* slot = slots.data_ptr<int64_t>();
  with_numbers_of(x, [&](auto one) {
    using Number = decltype(one);
    const auto *sums = g.data_ptr<Number>(), *row = x.data_ptr<Number>(), *weight = weights.data_ptr<Number>();
    auto *to_row = of_rows.data_ptr<Number>(), *to_weight = of_weights.data_ptr<Number>();
    for_each_token(x.size(0), dim, [&](int64_t i) {
      const auto* sum = sums + slot[i] / k * dim;
      const auto factor = weight[slot[i]];
      for (int64_t d = 0; d < dim; ++d) to_row[i * dim + d] = factor * sum[d];
      to_weight[slot[i]] = product_of(sum, row + i * dim, dim);
    });
  });
  return {of_rows, of_weights};
}

// [rows, dim] -> [tokens, dim]: the sum of each token's rows. No two rows have one place, so it is the same on every device and each time.
inline at::Tensor sums_of_rows(const at::Tensor& x, const Rows& rows, int64_t tokens) {
  if (on_host(x)) return sums_on_host(x, {}, rows.slots, tokens, rows.choices);
  const auto places = at::zeros({tokens * rows.choices, x.size(1)}, x.options()).index_copy_(0, rows.slots, x);
  return places.view({tokens, rows.choices, x.size(1)}).sum(1);
}

// Loops that gradients go through have no gradients of their own.
inline void refuse_second_gradient() {
  require(!c10::GradMode::is_enabled(), "mix_experts", "its gradient has none; hint: leave create_graph out");
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
    refuse_second_gradient();
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

// What it needs for backward is saved as libtorch's own operators save, so activation checkpoints drop it.
struct WeightedSums : torch::autograd::Function<WeightedSums> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows, const at::Tensor& weights,
                            const at::Tensor& slots) {
    const NoSpmd plain;
    context->save_for_backward({rows, weights, slots});
    return sums_on_host(rows, weights, slots, weights.size(0), weights.size(1));
  }
  static TensorVector backward(torch::autograd::AutogradContext* context, const TensorVector& gradients) {
    refuse_second_gradient();
    const NoSpmd plain;
    const auto saved = context->get_saved_variables();
    auto result = sums_backward_on_host(gradients[0], saved[0], saved[1], saved[2]);
    result.emplace_back();
    return result;
  }
};

inline at::Tensor weighted_sums(const at::Tensor& computed, const at::Tensor& weights, const Rows& rows) {
  const auto dtype = c10::promoteTypes(computed.scalar_type(), at::kFloat);
  const auto of_rows = computed.to(dtype), of_weights = weights.to(dtype);
  if (on_host(of_rows)) return WeightedSums::apply(of_rows, of_weights.contiguous(), rows.slots).to(computed.scalar_type());
  const auto factors = linear(
      of_weights.reshape({-1}), [&](const at::Tensor& y) { return selected(y, rows.slots); },
      [slots = rows.slots, all = weights.numel()](const at::Tensor& gradient) {
        return at::zeros({all}, gradient.options()).index_copy_(0, slots, gradient);
      });
  const auto sums = linear(
      of_rows.mul(factors.unsqueeze(1)), [&](const at::Tensor& y) { return sums_of_rows(y, rows, weights.size(0)); },
      [tokens = rows.tokens](const at::Tensor& gradient) { return selected(gradient, tokens); });
  return sums.to(computed.scalar_type());
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
