// Learned embeddings of positions.
#pragma once

#include <dtensor/parallel/context/context_parallel.hpp>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// Those of a sequence of `length`: table [positions, dim] -> [length, dim]. The first ones, in the order of a dt::ContextParallel if there
// is one inside Spmd.
at::Tensor position_rows(const at::Tensor& table, int64_t length);

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor position_rows(const at::Tensor& table, int64_t length) {
  if (!ContextParallel::current()) {
    ContextParallel::check_in_place(table);
    return table.slice(0, 0, length);
  }
  return table.index_select(0, sequence_positions(length, table.options()));
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
