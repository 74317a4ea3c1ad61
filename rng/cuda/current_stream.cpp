// For builds with kernels.
#include "rng/cuda/kernels.hpp"

#include <c10/cuda/CUDAStream.h>

namespace dtensor::rng::cuda {

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

}  // namespace dtensor::rng::cuda
