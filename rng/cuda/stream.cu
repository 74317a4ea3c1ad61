// Draws on a GPU with the numbers of libtorch's own kernels.
#include "rng/cuda/launch.cuh"
#include "rng/cuda/numbers.cuh"

namespace dtensor::rng::cuda {

namespace {

template <class T, class Call, class Transform>
__global__ void fill(T* to, int64_t count, ShardIndex part, Words words, Call call, Transform transform) {
  for (int64_t i = first_element(); i < count; i += all_threads()) to[i] = number(part.global(i), words, call, transform);
}

}  // namespace

bool have_kernels() { return true; }

Device current_device() {
  int device = 0, multiprocessors = 0, threads = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device);
  return {multiprocessors, threads};
}

bool draw(const Elements& elements, const Words& words, const Numbers& numbers) {
  return with_numbers(elements.dtype, numbers, [&]<class T, class Call, class Transform>(T, Call call, Transform transform) {
    launch_over(elements, fill<T, Call, Transform>, words, call, transform);
  });
}

}  // namespace dtensor::rng::cuda
