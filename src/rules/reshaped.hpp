// The lowering of an operator that keeps the sequence of elements (view, reshape): the local tensor takes the local sizes of the result.
// It is a type of its own, so that the code that runs it can recognize it.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <dtensor/mesh/alias.hpp>

#include <ATen/TensorUtils.h>
#include <ATen/ops/reshape.h>

#include <algorithm>
#include <utility>

namespace dtensor::rules {

struct Reshaped {
  Sizes sizes;
  bool copies;  // the operator's result is never a view
  // A view needs a row-major local tensor. Local strides may differ from the global ones, and every rank must decide alike whether they
  // allow a view: a local tensor of length one would be contiguous in any order.
  bool strict;

  bool is_alias(const at::Tensor& source) const { return !copies && is_in_order(source); }
  at::Tensor alias(const at::Tensor& source) const {
    return detail::alias(source, sizes, contiguous_strides(sizes), source.storage_offset());
  }

  void operator()(LocalCall& local) const {
    const auto source = local.arg(0).toTensor();
    const bool in_order = is_in_order(source), apart = copies || (strict && !in_order);
    auto result = source.numel() == 0 && !in_order ? without_elements(source, apart)
                  : in_order                       ? alias(source)
                                                   : at::reshape(source, sizes);
    if (apart && result.is_alias_of(source)) result = result.clone(at::MemoryFormat::Contiguous);
    local.replace({std::move(result)});
  }

 private:
  bool is_in_order(const at::Tensor& source) const {
    return detail::shard_in_row_major_order(source, strict) ||
           (source.numel() == 0 && detail::in_row_major_order(filled(source.sizes()), source.strides()));
  }

  // For an empty local tensor: decides as if its empty dims had length one, and so as the ranks that have elements do.
  at::Tensor without_elements(const at::Tensor& source, bool apart) const {
    const auto strides = apart ? c10::nullopt : at::detail::computeStride(filled(source.sizes()), source.strides(), filled(sizes));
    return strides ? detail::alias(source, sizes, *strides, source.storage_offset()) : alias(source);
  }

  static Sizes filled(c10::IntArrayRef sizes) {
    Sizes filled(sizes);
    std::ranges::replace(filled, 0, 1);
    return filled;
  }
};

}  // namespace dtensor::rules
