// Filling memory with what a counter-based generator draws.
#pragma once

#include <dtensor/placement.hpp>

#include <ATen/core/Tensor.h>

#include <functional>

namespace dtensor::rng {

// One draw of a generator: what its elements are a function of, beside their indices.
struct CounterDraw {
  uint64_t seed = 0, number = 0;
};

// Calls its argument with runs of row-major global indices.
using Runs = std::function<void(const std::function<void(const Interval&)>&)>;

// Where to write the elements of some runs, one after the other: a contiguous tensor on the CPU of as many elements.
struct Destination {
  at::Tensor to;
  Runs runs;
};

// The operator `name` ("uniform_") with its numbers (from and to, mean and std, lambda, ...) into a floating-point tensor; "bernoulli_"
// into any. False when there is no such.
bool fill(const Destination& destination, const CounterDraw& draw, std::string_view name, double a, double b);

// Whole numbers from `from`, of `range` of them (0: all of 64 bits).
void fill_whole(const Destination& destination, const CounterDraw& draw, int64_t from, uint64_t range);

}  // namespace dtensor::rng
