// Maps an operator and a dtype to the numbers that dt::Generator draws; used by the kernels that write them.
#pragma once

#include "rng/counter_fill.hpp"

#include <ATen/Dispatch.h>

#include <cmath>
#include <limits>

namespace dtensor::rng {

// T: what is written, C: what it is computed in.
template <class T, class C, class Write>
bool with_floating_numbers(const CounterNumbers& n, const Write& write) {
  if (n.name == "uniform_") return write(T(), Uniform<C, std::numeric_limits<T>::digits>(n.a, n.b)), true;
  if (n.name == "normal_") return write(T(), Normal<C>(n.a, n.b)), true;
  if (n.name == "log_normal_") return write(T(), LogNormal<C>(n.a, n.b)), true;
  if (n.name == "exponential_") return write(T(), Exponential<C>(n.a)), true;
  if (n.name == "geometric_") return write(T(), Geometric<C>(std::log1p(-n.a))), true;
  if (n.name == "cauchy_") return write(T(), Cauchy<C>(n.a, n.b)), true;
  return false;
}

template <class T, class Write>
bool with_any_numbers(const CounterNumbers& n, const Write& write) {
  if (n.name == "bernoulli_") return write(T(), Coin(n.a)), true;
  if (n.name != "random_") return false;
  const bool narrow = n.range != 0 && n.range <= uint64_t{1} << 32;
  narrow ? write(T(), Whole32{n.from, n.range}) : write(T(), Whole64{n.from, n.range});
  return true;
}

// Calls write(T(), numbers). False when the operator does not draw this dtype.
template <class Write>
bool with_numbers(at::ScalarType dtype, const CounterNumbers& n, const Write& write) {
  if (n.name == "geometric_" && at::isIntegralType(dtype, false)) {
    AT_DISPATCH_INTEGRAL_TYPES(dtype, "geometric_", [&] { write(scalar_t(), Geometric<double>(std::log1p(-n.a))); });
    return true;
  }
  if (n.name == "bernoulli_" || n.name == "random_") {
    return AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, dtype, "random_",
                                      [&] { return with_any_numbers<scalar_t>(n, write); });
  }
  switch (dtype) {
    case at::kFloat: return with_floating_numbers<float, float>(n, write);
    case at::kDouble: return with_floating_numbers<double, double>(n, write);
    case at::kHalf: return with_floating_numbers<at::Half, float>(n, write);
    case at::kBFloat16: return with_floating_numbers<at::BFloat16, float>(n, write);
    default: return false;
  }
}

}  // namespace dtensor::rng
