// embedding_bag on distributed tables: the rows, as embedding finds them, and a sum per bag. libtorch's own resizes tensors in place.
#include "src/dispatch/composite.hpp"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_bag_ops.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>

namespace dtensor::dispatch {

namespace {

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
enum : int64_t { kSum = 0, kMean = 1 };  // of libtorch's modes

// The bag of each index.
std::vector<int64_t> bags_of(const std::vector<int64_t>& offsets, int64_t bags, int64_t indices) {
  std::vector<int64_t> result(indices);
  for (int64_t bag = 0; bag < bags; ++bag) {
    const auto end = bag + 1 < static_cast<int64_t>(offsets.size()) ? offsets[bag + 1] : indices;
    std::fill(result.begin() + offsets[bag], result.begin() + end, bag);
  }
  return result;
}

// What libtorch refuses, and what is not made of rows that add up, is its own to say and do.
bool adds_rows(const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets, bool scale_by_frequency, int64_t mode,
               bool sparse) {
  return is_dtensor(weight) && weight.dim() == 2 && indices.dim() == 1 && offsets.dim() == 1 && !scale_by_frequency && !sparse &&
         (mode == kSum || mode == kMean) && at::isIntegralType(indices.scalar_type(), false);
}

bool make_bags(const std::vector<int64_t>& offsets, int64_t bags, int64_t indices) {
  return bags > 0 && offsets.front() == 0 && offsets.back() <= indices && std::is_sorted(offsets.begin(), offsets.end());
}

Results sums_of_rows(const at::Tensor& weight, const at::Tensor& indices, const std::vector<int64_t>& offsets, int64_t bags, int64_t mode,
                     const at::Tensor& factors, c10::optional<int64_t> padding) {
  const auto bag = beside(weight, plain([&] { return at::tensor(bags_of(offsets, bags, indices.numel()), at::kLong); }));
  auto rows = at::embedding(weight, indices);
  if (factors.defined()) rows = rows.mul(factors.unsqueeze(1));
  auto counted = indices.eq(indices);
  if (padding) {
    counted = indices.ne(*padding < 0 ? *padding + weight.size(0) : *padding);
    rows = rows.masked_fill(counted.logical_not().unsqueeze(1), 0);
  }
  auto sums = weight.new_zeros({bags, weight.size(1)}).index_add(0, bag, rows);
  const auto counts = counted.to(at::kLong).new_zeros({bags}).index_add(0, bag, counted.to(at::kLong));
  if (mode == kMean) sums = sums.div(counts.clamp_min(1).unsqueeze(1));
  return {sums, bag, counts, counts.new_zeros({bags})};
}

Results embedding_bag(c10::DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets,
                      bool scale_by_frequency, int64_t mode, bool sparse, const c10::optional<at::Tensor>& factors,
                      bool include_last_offset) {
  if (adds_rows(weight, indices, offsets, scale_by_frequency, mode, sparse)) {
    const auto starts = numbers(offsets);
    const auto bags = static_cast<int64_t>(starts.size()) - include_last_offset;
    if (make_bags(starts, bags, indices.numel())) {
      return sums_of_rows(weight, indices, starts, bags, mode, factors.value_or(at::Tensor()), c10::nullopt);
    }
  }
  return at::_ops::embedding_bag::redispatch(below(keys), weight, indices, offsets, scale_by_frequency, mode, sparse, factors,
                                             include_last_offset);
}

Results embedding_bag_padded(c10::DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets,
                             bool scale_by_frequency, int64_t mode, bool sparse, const c10::optional<at::Tensor>& factors,
                             bool include_last_offset, c10::optional<int64_t> padding) {
  if (adds_rows(weight, indices, offsets, scale_by_frequency, mode, sparse)) {
    const auto starts = numbers(offsets);
    const auto bags = static_cast<int64_t>(starts.size()) - include_last_offset;
    if (make_bags(starts, bags, indices.numel())) {
      return sums_of_rows(weight, indices, starts, bags, mode, factors.value_or(at::Tensor()), padding);
    }
  }
  return at::_ops::embedding_bag_padding_idx::redispatch(below(keys), weight, indices, offsets, scale_by_frequency, mode, sparse, factors,
                                                         include_last_offset, padding);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  library.impl("embedding_bag", TORCH_FN(embedding_bag));
  library.impl("embedding_bag.padding_idx", TORCH_FN(embedding_bag_padded));
}

}  // namespace

}  // namespace dtensor::dispatch
