// The one thing that the nccl transport needs of libtorch's CUDA library by name; all else goes through c10's device guards.
#pragma once

#include <c10/core/Stream.h>

#include <cuda_runtime_api.h>

namespace dtensor::comm::nccl {

cudaStream_t native_stream(const c10::Stream& stream);

}  // namespace dtensor::comm::nccl
