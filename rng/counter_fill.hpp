// Filling memory with what a counter-based generator draws.
#pragma once

#include "rng/counter_numbers.hpp"

#include <dtensor/mesh/placement.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace dtensor::rng {

// Calls its argument with runs of row-major global indices.
using Runs = std::function<void(const std::function<void(const Interval&)>&)>;

// What an operator draws.
struct CounterNumbers {
  std::string name;     // "uniform_"
  double a = 0, b = 0;  // its numbers: from and to, mean and std, lambda, ...
  int64_t from = 0;     // random_: whole numbers from here
  uint64_t range = 0;   //   of so many; 0: all of 64 bits
};

// Writes the elements of some runs, one after the other, to a contiguous tensor on the CPU of as many elements. False when its dtype is not
// drawn.
bool fill(const at::Tensor& to, const Runs& runs, const CounterDraw& draw, const CounterNumbers& numbers);

}  // namespace dtensor::rng
