// The streams of a rank besides World::generator().
#pragma once

#include <ATen/core/Generator.h>

#include <map>
#include <utility>

namespace dtensor::rng {

struct Streams {
  at::Generator own;                                         // of rank_local_random(); undefined until it is drawn from
  std::map<std::pair<int, bool>, at::Generator> of_devices;  // by CUDA device, and whether it is of rank_local_random()
};

}  // namespace dtensor::rng
