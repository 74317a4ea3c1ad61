// One number of a counter-based stream.
#include <dtensor/rng/random.hpp>

#include "rng/counter_numbers.hpp"

namespace dtensor::rng {

double uniform_at(uint64_t seed, uint64_t draw, int64_t index) {
  return number_at(Uniform<double, 53>(0, 1), CounterDraw{seed, draw}, index);
}

}  // namespace dtensor::rng
