// Copies of generators.
#pragma once

#include "rng/counter_generator.hpp"

#include <ATen/CPUGeneratorImpl.h>

namespace dtensor::rng {

// A copy of a generator. (In some versions of libtorch, at::Generator::clone() never frees its copy.)
inline at::Generator copy_of(const at::Generator& generator) {
  if (generator.device().is_cuda()) return generator.clone();  // libtorch's class of it is not there in every build
  auto copy = as_counter(generator) ? at::make_generator<CounterGenerator>(0) : at::make_generator<at::CPUGeneratorImpl>();
  copy.set_state(generator.get_state());
  return copy;
}

}  // namespace dtensor::rng
