// Host memory that a GPU's tensors are copied to and from.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace dtensor::checkpoints {

// Pinned where there is CUDA, so that copies go at full speed and beside other work; plain where the system does not pin so much.
inline at::Tensor host_memory(int64_t bytes) {
  if (at::globalContext().hasCUDA()) {
    try {
      return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    } catch (const c10::Error&) {
    }
  }
  return at::empty({bytes}, at::kByte);
}

}  // namespace dtensor::checkpoints
