// The current CUDA stream, for builds with kernels.
#include "rng/cuda/kernels.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace dtensor::rng::cuda {

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

bool is_capturing() {
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream().stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace dtensor::rng::cuda
