// What rng/cuda/numbers.cuh makes of a seed, computed on the CPU.
#pragma once

#include "rng/cuda/kernels.hpp"

namespace dtensor::test {

// As rng::cuda::draw, to memory of the host.
bool draw_on_host(const rng::cuda::Elements& elements, const rng::cuda::Words& words, const rng::cuda::Numbers& numbers);

}  // namespace dtensor::test
