#include "tests/rng/cuda/numbers_on_host.hpp"

#include "rng/cuda/numbers.cuh"

namespace dtensor::test {

using namespace rng::cuda;

bool draw_on_host(const Elements& elements, const Words& words, const Numbers& numbers) {
  return with_numbers(elements.dtype, numbers, [&]<class T, class Call, class Transform>(T, Call call, Transform transform) {
    for (int64_t i = 0; i < elements.count; ++i) {
      static_cast<T*>(elements.to)[i] = number(elements.part.global(i), words, call, transform);
    }
  });
}

}  // namespace dtensor::test
