// Logarithm, exponential, sine and cosine as series of additions, multiplications and divisions, which every processor rounds alike. So CPU
// and GPU get the same bits; those of their own libraries differ. Do not compile this with contraction to fused multiply-adds.
#pragma once

#include <dtensor/rng/philox.hpp>

#include <cstring>

namespace dtensor::rng {

template <class T>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Word = uint32_t;
  using Int = int32_t;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr Word kSqrtHalf = 0x3F3504F3u;  // sqrt(1/2)
  // Terms that reach half a unit in the last place.
  static constexpr int kLog = 5, kSin = 5, kCos = 6, kExp = 8;
};
template <>
struct FloatBits<double> {
  using Word = uint64_t;
  using Int = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr Word kSqrtHalf = 0x3FE6A09E667F3BCDull;
  static constexpr int kLog = 11, kSin = 9, kCos = 10, kExp = 14;
};

template <class T>
DTENSOR_HOST_DEVICE typename FloatBits<T>::Word bits_of(T value) {
  typename FloatBits<T>::Word bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <class T>
DTENSOR_HOST_DEVICE T from_bits(typename FloatBits<T>::Word bits) {
  T value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// log(x 2^scale), x positive and normal: x = m 2^e with m around 1, log m = 2 artanh((m - 1) / (m + 1)).
template <class T>
DTENSOR_HOST_DEVICE T series_log(T x, int scale = 0) {
  using F = FloatBits<T>;
  const auto bits = bits_of(x);
  const auto e = static_cast<typename F::Int>(bits - F::kSqrtHalf) >> F::kMantissa;
  const T m = from_bits<T>(bits - (static_cast<typename F::Word>(e) << F::kMantissa));
  const T s = (m - 1) / (m + 1), z = s * s;
  T sum = T(1) / (2 * F::kLog - 1);
  for (int k = F::kLog - 2; k >= 0; --k) sum = sum * z + T(1) / (2 * k + 1);
  return static_cast<T>(static_cast<typename F::Int>(e) + scale) * T(0.69314718055994530942) + 2 * s * sum;
}

template <class T>
struct SinCos {
  T sin, cos;
};

// Of the angle 2 pi word / 2^32 (2^64 for double).
template <class T>
DTENSOR_HOST_DEVICE SinCos<T> series_sincos(typename FloatBits<T>::Word word) {
  using F = FloatBits<T>;
  constexpr int kBits = sizeof(word) * 8;
  const auto quadrant = (word + (typename F::Word(1) << (kBits - 3))) >> (kBits - 2);
  const auto rest = static_cast<typename F::Int>(word - (quadrant << (kBits - 2)));
  const T a = static_cast<T>(rest) * T(6.28318530717958647693 / (kBits == 32 ? 4294967296.0 : 18446744073709551616.0));
  const T z = a * a;
  T sin = 1, cos = 1;
  for (int k = F::kSin - 1; k > 0; --k) sin = 1 - sin * z * (T(1) / T((2 * k) * (2 * k + 1)));
  for (int k = F::kCos - 1; k > 0; --k) cos = 1 - cos * z * (T(1) / T((2 * k - 1) * (2 * k)));
  sin = sin * a;
  const bool swap = quadrant & 1;
  const T s = swap ? cos : sin, c = swap ? sin : cos;
  return {quadrant & 2 ? -s : s, (quadrant + 1) & 2 ? -c : c};
}

// exp(x); infinite above, 0 below what T holds in normal numbers.
template <class T>
DTENSOR_HOST_DEVICE T series_exp(T x) {
  using F = FloatBits<T>;
  const T limit = T(F::kBias) * T(0.69314718055994530942);
  if (!(x < limit)) return x != x ? x : from_bits<T>(static_cast<typename F::Word>(2 * F::kBias + 1) << F::kMantissa);
  if (x < 1 - limit) return 0;
  const T scaled = x * T(1.44269504088896340736);
  const auto k = static_cast<typename F::Int>(scaled + (scaled < 0 ? T(-0.5) : T(0.5)));
  // log 2 in two numbers, of which the first has so few bits that its product with k is exact.
  const T high = sizeof(T) == 4 ? T(0.693145751953125) : T(0.693147180369123816490173339843750);
  const T low = sizeof(T) == 4 ? T(0.0000014286068203094172) : T(1.9082149292705878161442E-10);
  const T r = (x - static_cast<T>(k) * high) - static_cast<T>(k) * low;
  T sum = 1;
  for (int i = F::kExp - 1; i > 0; --i) sum = 1 + sum * r * (T(1) / T(i));
  return sum * from_bits<T>(static_cast<typename F::Word>(k + F::kBias) << F::kMantissa);
}

}  // namespace dtensor::rng
