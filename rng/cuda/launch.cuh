// Starts a kernel with a thread for each element of a shard.
#pragma once

#include "rng/cuda/kernels.hpp"

#include <c10/util/Exception.h>

#include <cuda_runtime.h>

#include <algorithm>

namespace dtensor::rng::cuda {

// `kernel` takes where to write, how many elements, their part and `arguments`; its threads go round where there are more.
template <class T, class... Parameters, class... Arguments>
void launch_over(const Elements& elements, void (*kernel)(T*, int64_t, ShardIndex, Parameters...), const Arguments&... arguments) {
  constexpr int kThreads = 256;
  const int64_t blocks = std::min<int64_t>(ceil_div(elements.count, kThreads), 1 << 20);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(elements.stream)>>>(
      static_cast<T*>(elements.to), elements.count, elements.part, arguments...);
  const auto error = cudaGetLastError();
  TORCH_CHECK(error == cudaSuccess, "dtensor: a kernel that draws random numbers did not start: ", cudaGetErrorString(error));
}

__device__ inline int64_t first_element() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t all_threads() { return int64_t{gridDim.x} * blockDim.x; }

}  // namespace dtensor::rng::cuda
