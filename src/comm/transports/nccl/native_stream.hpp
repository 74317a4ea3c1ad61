// The only function of the nccl transport that links with libtorch's CUDA library. Everything else goes through c10's device guards.
#pragma once

#include <c10/core/Stream.h>

#include <cuda_runtime_api.h>

namespace dtensor::comm::nccl {

cudaStream_t native_stream(const c10::Stream& stream);

}  // namespace dtensor::comm::nccl
