// Tensors and their local shards, made from the definition of a layout.
#pragma once

#include "tests/support/core_support.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/layout.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <vector>

namespace dtensor::test {

using Shape = std::vector<int64_t>;
using Coordinate = std::vector<int64_t>;

// The global tensor: small multiples of 25, so that every partial form of it is exact in every dtype.
inline at::Tensor global_tensor(const Shape& shape, at::ScalarType dtype) {
  int64_t numel = 1;
  for (int64_t n : shape) numel *= n;
  const auto index = at::arange(numel, at::kLong);
  const auto values = dtype == at::kBool ? index.remainder(3).eq(1) : index.mul(7).remainder(11).mul(25);
  return values.reshape(shape).to(dtype);
}

// What rank `c` of `n` holds of `whole` when it is partial: different on every rank, `op` of them all is `whole`.
inline at::Tensor partial_value(const at::Tensor& whole, ReduceOp op, int64_t c, int64_t n) {
  const bool owner = c == 1 % n;
  if (whole.scalar_type() == at::kBool) {
    const bool all = op == ReduceOp::min || op == ReduceOp::product;
    return owner ? whole : all ? at::ones_like(whole) : at::zeros_like(whole);
  }
  const auto offset =
      at::arange(whole.numel(), at::kLong).remainder(3).add(c + 1).reshape(whole.sizes()).to(whole.scalar_type());
  const auto sum_of_others = [&] {
    auto sum = at::zeros_like(whole);
    for (int64_t other = 0; other < n; ++other) {
      if (other != 1 % n) sum += offset + (other - c);
    }
    return sum;
  };
  switch (op) {
    case ReduceOp::sum: return owner ? whole - sum_of_others() : offset;
    case ReduceOp::avg: return owner ? whole - sum_of_others() : whole + offset;
    case ReduceOp::max: return owner ? whole : whole - offset;
    case ReduceOp::min: return owner ? whole : whole + offset;
    case ReduceOp::product:
      return n == 1 ? whole : owner ? -whole : c == 0 ? -at::ones_like(whole) : at::ones_like(whole);
    case ReduceOp::norm2:
      return n == 1 ? whole : owner ? whole * 3 / 5 : c == 0 ? whole * 4 / 5 : at::zeros_like(whole);
  }
  return whole;
}

// The local tensor of the rank at `at`, from the definition of a layout.
inline at::Tensor local_tensor(at::Tensor whole, const Layout& layout, c10::IntArrayRef at) {
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    std::vector<int64_t> indices;
    for (const auto& part : layout.intervals(d, at)) {
      for (int64_t i = part.begin; i < part.end; ++i) indices.push_back(i);
    }
    whole = whole.index_select(d, at::tensor(indices, at::kLong));
  }
  for (int64_t i = 0; i < layout.mesh().ndim(); ++i) {
    const auto& p = layout.placements()[i];
    if (p.is_partial()) whole = partial_value(whole, p.op, at[i], layout.mesh().size(i));
  }
  for (int64_t i = 0; i < layout.mesh().ndim(); ++i) {
    const auto& p = layout.placements()[i];
    if (!p.is_flat()) continue;
    auto sizes = std::vector<int64_t>(layout.ndim(), 1);
    std::vector<int64_t> elements;
    for (int64_t e = 0; e < whole.numel(); ++e) {
      if ((p.offset + e) / p.unit == at[i]) elements.push_back(e);
    }
    sizes.back() = static_cast<int64_t>(elements.size());
    whole = whole.reshape({-1}).index_select(0, at::tensor(elements, at::kLong)).view(sizes);
  }
  return whole;
}

// All placements of `choices` that fit, one per mesh dimension.
inline std::vector<LayoutPtr> layouts(const DeviceMesh& mesh, const std::vector<Placement>& choices, const at::Tensor& whole) {
  std::vector<Placements> all{{}};
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    std::vector<Placements> longer;
    for (const auto& prefix : all) {
      for (const auto& p : choices) {
        longer.push_back(prefix);
        longer.back().push_back(p);
      }
    }
    all = std::move(longer);
  }
  std::vector<LayoutPtr> result;
  for (const auto& placements : all) {
    // Parts of a sum may be negative; norms of parts cannot be.
    const auto norm_in = [](const Placement& outer, const Placement& inner) {
      return outer.is_partial() && !outer.is_partial(ReduceOp::norm2) && inner.is_partial(ReduceOp::norm2);
    };
    if (std::ranges::adjacent_find(placements, norm_in) != placements.end()) continue;
    try {
      result.push_back(Layout::get(mesh, placements, whole.sizes(), whole.scalar_type()));
    } catch (const Error&) {  // a split that does not divide
    }
  }
  return result;
}

}  // namespace dtensor::test
