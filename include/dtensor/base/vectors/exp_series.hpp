// Numbers that exponential.inl computes with.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)

namespace dtensor {

// The Taylor series of exp, largest power first, and what brings its argument near 0. kLn2High has few bits, so that its multiples are
// exact.
template <class T>
struct ExpSeries;
template <>
struct ExpSeries<float> {
  using Bits = uint32_t;
  static constexpr int kMantissa = 23, kCount = 8;
  static constexpr Bits kOne = 127 << 23;
  static constexpr float kLowest = -87.0f, kLog2e = 1.44269504088896341f, kRound = 12582912.0f;  // 1.5 2^23
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kTerms[kCount] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1, 1};
};
template <>
struct ExpSeries<double> {
  using Bits = uint64_t;
  static constexpr int kMantissa = 52, kCount = 14;
  static constexpr Bits kOne = Bits{1023} << 52;
  static constexpr double kLowest = -708.0, kLog2e = 1.44269504088896341, kRound = 6755399441055744.0;  // 1.5 2^52
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kTerms[kCount] = {
      1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040,
      1. / 720,        1. / 120,       1. / 24,       1. / 6,       1. / 2,      1,          1};
};

}  // namespace dtensor

#pragma GCC visibility pop
