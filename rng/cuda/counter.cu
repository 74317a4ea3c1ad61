// dt::Generator's draws on a GPU, with the bits of the CPU. Compiled without contraction (meson.build), see elementary.hpp.
#include "rng/counter_dispatch.hpp"
#include "rng/cuda/kernels.hpp"

#include <cuda_runtime.h>

namespace dtensor::rng::cuda {

namespace {

template <class T, class Numbers>
__global__ void fill(T* to, int64_t count, PartIndex part, CounterDraw draw, Numbers numbers) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = static_cast<T>(number_at(numbers, draw, part.global(i)));
  }
}

}  // namespace

bool draw_by_counter(const Elements& elements, const CounterDraw& draw, const CounterNumbers& numbers) {
  return with_numbers(elements.dtype, numbers, [&]<class T>(T, const auto& of_type) {
    constexpr int kThreads = 256;
    const int64_t blocks = std::min<int64_t>(ceil_div(elements.count, kThreads), 1 << 20);
    fill<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(elements.stream)>>>(
        static_cast<T*>(elements.to), elements.count, elements.part, draw, of_type);
  });
}

}  // namespace dtensor::rng::cuda
