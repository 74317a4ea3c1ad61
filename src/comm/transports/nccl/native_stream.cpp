// Converts libtorch's streams to CUDA's.
#include "src/comm/transports/nccl/native_stream.hpp"

#include <c10/cuda/CUDAStream.h>

namespace dtensor::comm::nccl {

cudaStream_t native_stream(const c10::Stream& stream) { return c10::cuda::CUDAStream(stream).stream(); }

}  // namespace dtensor::comm::nccl
