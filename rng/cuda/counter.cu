// Draws of dt::Generator on a GPU, with the bits of the CPU. Compiled without contraction (meson.build), see elementary.hpp.
#include "rng/counter_dispatch.hpp"
#include "rng/cuda/launch.cuh"

namespace dtensor::rng::cuda {

namespace {

template <class T, class Numbers>
__global__ void fill(T* to, int64_t count, ShardIndex part, CounterDraw draw, Numbers numbers) {
  for (int64_t i = first_element(); i < count; i += all_threads()) {
    to[i] = static_cast<T>(number_at(numbers, draw, part.global(i)));
  }
}

}  // namespace

bool draw_by_counter(const Elements& elements, const CounterDraw& draw, const CounterNumbers& numbers) {
  return with_numbers(elements.dtype, numbers, [&]<class T, class Numbers>(T, const Numbers& of_type) {
    launch_over(elements, fill<T, Numbers>, draw, of_type);
  });
}

}  // namespace dtensor::rng::cuda
