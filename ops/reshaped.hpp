// What an operator that keeps the sequence of elements does with a rank's part: it takes the part's sizes in the result. A type of its
// own, so that what runs it can know it.
#pragma once

#include <dtensor/rules/rule.hpp>

#include "src/core/alias.hpp"

#include <ATen/ops/reshape.h>

#include <utility>

namespace dtensor::rules {

struct Reshaped {
  Sizes sizes;
  bool copies;  // the operator's result is never a view
  // The local order must be row-major for a view. Local strides may differ from the global ones, and whether they allow a view must be
  // decided alike on every rank: a part of length one would be contiguous in any order.
  bool strict;

  bool is_alias(const at::Tensor& source) const { return !copies && detail::in_row_major_order(source); }
  at::Tensor alias(const at::Tensor& source) const {
    return detail::alias(source, sizes, contiguous_strides(sizes), source.storage_offset());
  }

  // An empty part whose order is to be found wanting again, as that of the others is.
  at::Tensor out_of_order(const at::Tensor& empty) const { return detail::alias(empty, sizes, Sizes(sizes.size(), 0), empty.storage_offset()); }

  void operator()(LocalCall& local) const {
    const auto source = local.arg(0).toTensor();
    const bool in_order = detail::in_row_major_order(source);
    auto result = in_order ? alias(source) : source.numel() == 0 ? out_of_order(source) : at::reshape(source, sizes);
    if ((copies || (strict && !in_order)) && result.is_alias_of(source)) result = result.clone();
    local.replace({std::move(result)});
  }
};

}  // namespace dtensor::rules
