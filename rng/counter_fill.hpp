// Fills memory with the numbers of a counter-based generator.
#pragma once

#include "rng/counter_numbers.hpp"

#include <dtensor/mesh/placement.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace dtensor::rng {

// Calls its argument with runs of row-major global indices.
using Runs = std::function<void(const std::function<void(const Interval&)>&)>;

// The numbers that an operator draws.
struct CounterNumbers {
  std::string name;     // "uniform_"
  double a = 0, b = 0;  // its arguments: from and to, mean and std, lambda, ...
  int64_t from = 0;     // random_: the smallest whole number
  uint64_t range = 0;   //   how many of them; 0: all of 64 bits
};

// Writes the elements of the runs, one after the other, to a contiguous CPU tensor of as many elements. Returns false when its dtype is not
// drawn.
bool fill(const at::Tensor& to, const Runs& runs, const CounterDraw& draw, const CounterNumbers& numbers);

}  // namespace dtensor::rng
