// embedding_bag on distributed tables: an embedding, and a sum per bag. libtorch's own kernel resizes tensors in place.
#include "ops/composite/composite.hpp"

#include <ATen/OpMathType.h>
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

bool make_bags(const std::vector<int64_t>& offsets, int64_t bags, int64_t indices) {
  return bags > 0 && offsets.front() == 0 && offsets.back() <= indices && std::ranges::is_sorted(offsets);
}

struct Arguments {
  const at::Tensor &weight, &indices, &offsets;
  bool scale_by_frequency;
  int64_t mode;
  bool sparse;
  const c10::optional<at::Tensor>& factors;
  bool include_last_offset;
  c10::optional<int64_t> padding = {};
};

// Nothing: what libtorch refuses, and what is not made of rows that add up, is its own to say and do.
c10::optional<Results> sums_of_rows(const Arguments& a) {
  const auto &weight = a.weight, &indices = a.indices;
  const bool adds = (a.mode == kSum || a.mode == kMean) && !a.scale_by_frequency && !a.sparse;
  const bool fits = is_dtensor(weight) && weight.dim() == 2 && indices.dim() == 1 && a.offsets.dim() == 1 &&
                    at::isIntegralType(indices.scalar_type(), false);
  if (!adds || !fits) return c10::nullopt;
  const auto offsets = numbers(a.offsets);
  const auto bags = static_cast<int64_t>(offsets.size()) - a.include_last_offset;
  if (!make_bags(offsets, bags, indices.numel())) return c10::nullopt;

  const auto bag =
      beside(weight, plain([&] { return at::tensor(bags_of(offsets, bags, indices.numel()), at::kLong).to(weight.device()); }));
  const auto dtype = weight.scalar_type(), wide = at::toOpMathType(dtype);  // as libtorch's sums
  auto rows = at::embedding(weight, indices).to(wide);
  if (a.factors && a.factors->defined()) rows = rows.mul(a.factors->unsqueeze(1));
  auto counted = indices.eq(indices);
  if (a.padding) {
    counted = indices.ne(*a.padding < 0 ? *a.padding + weight.size(0) : *a.padding);
    rows = rows.masked_fill(counted.logical_not().unsqueeze(1), 0);
  }
  auto sums = weight.new_zeros({bags, weight.size(1)}, wide).index_add(0, bag, rows);
  const auto ones = counted.to(at::kLong);
  const auto counts = ones.new_zeros({bags}).index_add(0, bag, ones);
  if (a.mode == kMean) sums = sums.div(counts.clamp_min(1).unsqueeze(1));
  return Results{sums.to(dtype), bag, counts, counts.new_zeros({bags})};
}

Results embedding_bag(c10::DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets,
                      bool scale_by_frequency, int64_t mode, bool sparse, const c10::optional<at::Tensor>& factors,
                      bool include_last_offset) {
  if (const auto sums = sums_of_rows({weight, indices, offsets, scale_by_frequency, mode, sparse, factors, include_last_offset})) {
    return *sums;
  }
  return at::_ops::embedding_bag::redispatch(below(keys), weight, indices, offsets, scale_by_frequency, mode, sparse, factors,
                                             include_last_offset);
}

Results embedding_bag_padded(c10::DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& offsets,
                             bool scale_by_frequency, int64_t mode, bool sparse, const c10::optional<at::Tensor>& factors,
                             bool include_last_offset, c10::optional<int64_t> padding) {
  if (const auto sums = sums_of_rows({weight, indices, offsets, scale_by_frequency, mode, sparse, factors, include_last_offset, padding})) {
    return *sums;
  }
  return at::_ops::embedding_bag_padding_idx::redispatch(below(keys), weight, indices, offsets, scale_by_frequency, mode, sparse, factors,
                                                         include_last_offset, padding);
}

// libtorch's own, where the forward pass left out the bag of each index, makes it in a tensor that it resizes.
void embedding_bag_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto begin = stack->size() - op.schema().arguments().size();
  const auto argument = [&](size_t i) -> c10::IValue& { return (*stack)[begin + i]; };
  const auto gradient = argument(0).toTensor(), indices = argument(1).toTensor(), offsets = argument(2).toTensor();
  const auto distributed = is_dtensor(gradient) ? gradient : is_dtensor(indices) ? indices : offsets;
  if (is_dtensor(distributed) && indices.dim() == 1 && indices.numel() > 0 && argument(3).toTensor().numel() == 0) {
    const auto begins = numbers(offsets);
    const auto bags = static_cast<int64_t>(begins.size());
    const auto dtype = indices.scalar_type() == offsets.scalar_type() ? indices.scalar_type() : at::kLong;
    const auto make = [&] { return at::tensor(bags_of(begins, bags, indices.numel()), at::kLong).to(distributed.device(), dtype); };
    if (make_bags(begins, bags, indices.numel())) argument(3) = beside(distributed, plain(make));
  }
  op.redispatchBoxed(below(keys), stack);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  library.impl("embedding_bag", TORCH_FN(embedding_bag));
  library.impl("_embedding_bag_backward", torch::CppFunction::makeFromBoxedFunction<&embedding_bag_backward>());
  library.impl("embedding_bag.padding_idx", TORCH_FN(embedding_bag_padded));
}

}  // namespace

}  // namespace dtensor::dispatch
