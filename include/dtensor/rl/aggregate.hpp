// A loss of a batch from losses of tokens. All means are over global counts, so the losses and gradients of microbatches, and of ranks,
// add up to those of the whole batch.
//
//   const auto counts = rl::count(batch_mask);                     // once, of all that one optimizer step sees
//   for (auto& part : microbatches) rl::aggregate(losses_of(part), part.mask, {counts}).backward();
#pragma once

#include <dtensor/comm/communicator.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/rl/inputs.hpp>

#include <ATen/ops/stack.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What counts of a batch: tokens whose mask is not 0, and sequences that have one.
struct Counts {
  int64_t tokens = 0;
  int64_t sequences = 0;
  Counts operator+(const Counts& other) const { return {tokens + other.tokens, sequences + other.sequences}; }
  bool operator==(const Counts&) const = default;
};

// Of a mask [batch, time], of any dtype. Of a DTensor: of the whole of it; communicates 16 bytes when it is sharded.
Counts count(const at::Tensor& mask);
// Of plain masks, of which each rank of a mesh has its own: summed over all ranks. Communicates 16 bytes for each dimension of the mesh.
Counts count(const at::Tensor& mask, const DeviceMesh& mesh);
// Of the microbatches of a batch, together.
Counts count(const std::vector<at::Tensor>& masks);

enum class Aggregation {
  token_mean,                   // sum over tokens / tokens (DAPO, arXiv 2503.14476)
  token_sum,                    // sum over tokens
  sequence_mean_token_mean,     // mean over sequences of their mean over tokens (GRPO, arXiv 2402.03300)
  sequence_mean_token_sum,      // mean over sequences of their sum over tokens
  sequence_mean_token_sum_norm  // the same divided by `horizon`, a constant (Dr.GRPO, arXiv 2503.20783)
};

struct Normalization {
  Counts counts{};  // of the whole batch
  Aggregation how = Aggregation::token_mean;
  // For sequence_mean_token_sum_norm: the longest answer that there may be. Not the width of the batch, since padding would change the
  // loss.
  double horizon = 0;
};

// The loss, 0-dim, of `values` [batch, time] under `mask` [batch, time]. Values that are masked may be anything, NaN too; their gradient is
// 0. A sequence without tokens counts for nothing. Communicates nothing by itself: of sharded values the result is Partial, and reduced
// where it is read. Ranks with plain tensors of their own add results (and gradients) up; where gradients are averaged instead, multiply by
// the number of ranks. Throws for other shapes, for counts of 0 (the batch is empty on every rank), and for a horizon that is lacking.
at::Tensor aggregate(const at::Tensor& values, const at::Tensor& mask, const Normalization& by);

// The same of one number for each sequence: `values` [batch], summed over sequences that have a token, divided by counts.sequences.
at::Tensor aggregate_sequences(const at::Tensor& values, const at::Tensor& mask, const Normalization& by);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kAggregate = "rl::aggregate";

inline at::Tensor count_tensor(const at::Tensor& mask) {
  require(mask.defined() && mask.dim() == 2, "rl::count", "got {} for the mask; expected [batch, time]", shape_of(mask));
  const auto tokens = held(mask);
  return at::stack({tokens.sum(), tokens.any(1).sum()});
}

inline Counts read_counts(const at::Tensor& plain) { return {plain[0].item<int64_t>(), plain[1].item<int64_t>()}; }

inline void check_counts(const char* tag, const Normalization& by) {
  if (by.counts.tokens <= 0 || by.counts.sequences <= 0)
    fail(tag,
         "got counts of {} tokens and {} sequences; expected some; hint: they are rl::count() of the whole batch, which may be empty "
         "after filtering",
         by.counts.tokens, by.counts.sequences);
  require(by.how != Aggregation::sequence_mean_token_sum_norm || by.horizon > 0, tag,
          "got a horizon of {} for sequence_mean_token_sum_norm; expected the longest answer that there may be", by.horizon);
}

// Of values that are 0 where masked.
inline at::Tensor aggregate_held(const at::Tensor& values, const at::Tensor& held, const Normalization& by) {
  const auto tokens = static_cast<double>(by.counts.tokens), sequences = static_cast<double>(by.counts.sequences);
  switch (by.how) {
    case Aggregation::token_mean: return values.sum().div(tokens);
    case Aggregation::token_sum: return values.sum();
    case Aggregation::sequence_mean_token_sum: return values.sum().div(sequences);
    case Aggregation::sequence_mean_token_sum_norm: return values.sum().div(sequences * by.horizon);
    case Aggregation::sequence_mean_token_mean: break;
  }
  const auto lengths = held.sum(1).clamp_min(1).to(values.scalar_type());
  return values.sum(1).div(lengths).sum().div(sequences);
}

}  // namespace detail

inline Counts count(const at::Tensor& mask) {
  const at::NoGradGuard no_grad;
  return detail::read_counts(full_tensor(detail::count_tensor(mask)));
}

inline Counts count(const at::Tensor& mask, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const NoSpmd plain;
  require(!is_dtensor(mask), "rl::count", "the mask is a DTensor; expected a plain one; hint: count(mask) counts the whole of a DTensor");
  auto counts = detail::count_tensor(mask);
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) counts = mesh.communicator(dim).all_reduce(counts, ReduceOp::sum).get();
  return detail::read_counts(counts);
}

inline Counts count(const std::vector<at::Tensor>& masks) {
  Counts counts;
  for (const auto& mask : masks) counts = counts + count(mask);
  return counts;
}

inline at::Tensor aggregate(const at::Tensor& values, const at::Tensor& mask, const Normalization& by) {
  detail::check_tokens(detail::kAggregate, "values", values);
  detail::check_alike(detail::kAggregate, "the mask", mask, "values", values);
  detail::check_counts(detail::kAggregate, by);
  const auto held = detail::held(mask);
  return detail::aggregate_held(detail::only(values, held), held, by);
}

inline at::Tensor aggregate_sequences(const at::Tensor& values, const at::Tensor& mask, const Normalization& by) {
  detail::check_rows(detail::kAggregate, "values", values, mask);
  detail::check_counts(detail::kAggregate, by);
  return detail::only(values, detail::held(mask).any(1)).sum().div(static_cast<double>(by.counts.sequences));
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
