// Learned embeddings of positions.
#pragma once

#include <dtensor/tensor/attention_region.hpp>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// Those of a sequence of `length`: table [positions, dim] -> [length, dim]. The first ones, in the order of a dt::ContextParallel if there
// is one inside Spmd; those of its rows where a decoder runs the model. Throws c10::Error when there are fewer.
at::Tensor position_rows(const at::Tensor& table, int64_t length);

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor position_rows(const at::Tensor& table, int64_t length) {
  if (auto* decoding = Decoding::current()) return table.index_select(0, decoding->positions(length, table.size(0)));
  if (!AttentionRegion::current()) {
    AttentionRegion::check_table(table);
    TORCH_CHECK(length <= table.size(0), "a sequence of ", length, " is longer than the ", table.size(0), " positions");
    return table.slice(0, 0, length);
  }
  return table.index_select(0, sequence_positions(length, table.options()));
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
