// Experts that take no more than so many tokens of a batch: which rows are dropped.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/custom_op.hpp>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// The rows that an expert takes at most: ceil(factor * tokens * k / experts) of the global batch, whatever the number of ranks, and no more
// than there are.
int64_t capacity_of(double factor, int64_t tokens, int64_t k, int64_t experts);

// `chosen` int64 [..., k], -1: none, with -1 for each row beyond its expert's capacity. `drop`:
//   position     an expert takes the first tokens of the global batch
//   probability  it takes those with the largest of `weights` [..., k], the first ones among equals
// Ranks that share the tokens exchange both, so that they drop what one device would. Throws for a capacity below 1 and another `drop`.
at::Tensor limit_to_capacity(const at::Tensor& chosen, const at::Tensor& weights, int64_t experts, int64_t capacity,
                             const std::string& drop = "position");

// -- How ------------------------------------------------------------------------------------------------------------------

inline int64_t capacity_of(double factor, int64_t tokens, int64_t k, int64_t experts) {
  require(factor > 0 && std::isfinite(factor), "capacity_of", "got a capacity factor of {}; expected a finite number above 0", factor);
  const auto rows = static_cast<double>(tokens * k);
  return static_cast<int64_t>(std::min(std::ceil(factor * rows / static_cast<double>(experts)), std::max(rows, 1.0)));
}

namespace detail {

inline void check_drop(const std::string& drop) {
  require(drop == "position" || drop == "probability", "limit_to_capacity",
          "there is no way to drop called '{}'; expected position or probability", drop);
}

// On one device.
inline at::Tensor within_capacity(const at::Tensor& chosen, const at::Tensor& weights, int64_t experts, int64_t capacity, bool by_weight) {
  const auto numbers = chosen.reshape({-1});
  const auto flat = numbers.masked_fill(numbers.lt(0), experts);  // none: one expert more
  const auto order_of = [](const at::Tensor& x, bool descending) {
    return std::get<1>(at::sort(x, /*stable=*/true, /*dim=*/0, descending));
  };
  at::Tensor order;
  if (by_weight) {
    const auto best = order_of(weights.reshape({-1}), true);
    order = best.index_select(0, order_of(flat.index_select(0, best), false));
  } else {
    order = order_of(flat, false);
  }
  const auto sorted = flat.index_select(0, order);
  const auto counts = at::bincount(sorted, {}, experts + 1);
  const auto place = at::arange(flat.numel(), flat.options()) - (counts.cumsum(0) - counts).index_select(0, sorted);
  const auto kept = sorted.masked_fill(place.ge(capacity).logical_or(sorted.eq(experts)), -1);
  return at::empty_like(flat).index_copy_(0, order, kept).view(chosen.sizes());
}

}  // namespace detail

inline at::Tensor limit_to_capacity(const at::Tensor& chosen, const at::Tensor& weights, int64_t experts, int64_t capacity,
                                    const std::string& drop) {
  require(capacity >= 1, "limit_to_capacity", "got a capacity of {}; expected 1 or more", capacity);
  detail::check_drop(drop);
  const auto limit = [&](const at::Tensor& c, const at::Tensor& w) {
    return detail::within_capacity(c, w, experts, capacity, drop == "probability");
  };
  const c10::NoGradGuard no_grad;
  if (chosen.is_meta()) return at::empty_like(chosen);  // in a dry run
  const auto* layout = find_layout(chosen);
  if (!layout) return limit(chosen, weights.detach());
  const Placements whole(layout->mesh().ndim(), replicate());
  const LocalMapOptions known{.out_sizes = {chosen.sizes().vec()}};
  const auto all = local_map(limit, layout->mesh(), {whole, whole}, {whole}, known)(chosen, weights.detach());
  return redistribute(all, layout->placements());
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
