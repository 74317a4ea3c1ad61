// Where parameters lie in a unit's flat buffer, and views of its memory.
#pragma once

#include "src/parallel/fully_shard/schedule.hpp"

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

namespace dtensor::fsdp {

// The buffer of `ranks` pieces for tensors of so many elements each.
struct BufferPlan {
  std::vector<int64_t> offsets;
  int64_t piece = 0;
};

// Tensors follow each other, in blocks of `block` that no piece cuts, and begin at a cache line where that costs less than a hundredth.
BufferPlan plan_buffer(const std::vector<int64_t>& elements, int64_t ranks, int64_t block, int64_t element_size);

// The largest number of elements that any rank has under all placements but that of `cut`.
int64_t most_elements(const Layout& layout, int64_t cut);

// One-dimensional, uninitialized, and counted as long as anything refers to its memory.
at::Tensor counted_empty(int64_t elements, const at::TensorOptions& options, const std::shared_ptr<Counter>& counter);

}  // namespace dtensor::fsdp
