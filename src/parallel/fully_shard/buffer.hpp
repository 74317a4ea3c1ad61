// Places parameters in a unit's flat buffer, and counts the memory of buffers.
#pragma once

#include "src/parallel/fully_shard/schedule.hpp"

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

namespace dtensor::fsdp {

// The offset of each tensor in the buffer, and the elements of a rank's piece of it.
struct BufferPlan {
  std::vector<int64_t> offsets;
  int64_t piece = 0;
};

// Plans a buffer of `ranks` pieces for tensors with these `elements`. No piece cuts a block of `block` elements. Tensors begin at a cache
// line if that costs less than a hundredth of the buffer.
BufferPlan plan_buffer(const std::vector<int64_t>& elements, int64_t ranks, int64_t block, int64_t element_size);

// The largest number of elements that any rank has under all placements except that of mesh dimension `cut`.
int64_t most_elements(const Layout& layout, int64_t cut);

// An uninitialized one-dimensional tensor. Its bytes are counted as long as anything refers to its memory.
at::Tensor counted_empty(int64_t elements, const at::TensorOptions& options, const std::shared_ptr<Counter>& counter);

}  // namespace dtensor::fsdp
