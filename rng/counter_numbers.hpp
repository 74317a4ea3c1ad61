// Turns the words of a counter-based generator into random numbers. C is the type of the computation: float (from 32-bit words) or double
// (from 64-bit words). Plain C++ for host and device.
#pragma once

#include "rng/elementary.hpp"

namespace dtensor::rng {

// One draw of a generator: what its elements are a function of, beside their indices.
struct CounterDraw {
  uint64_t seed = 0, number = 0;
};

template <class C>
using WordOf = typename FloatBits<C>::Word;

// A number in [0, 1), of so many bits.
template <class C, int Bits>
DTENSOR_HOST_DEVICE C unit(WordOf<C> word) {
  using Int = typename FloatBits<C>::Int;  // of which processors convert many at once
  return static_cast<C>(static_cast<Int>(word >> (8 * sizeof(C) - Bits))) * C(1.0 / static_cast<double>(uint64_t{1} << Bits));
}

// The logarithm of a number in (0, 1].
template <class C>
DTENSOR_HOST_DEVICE C log_unit(WordOf<C> word) {
  using Int = typename FloatBits<C>::Int;
  return sizeof(C) == 4 ? series_log(static_cast<C>(static_cast<Int>((word >> 8) + 1)), -24)
                        : series_log(static_cast<C>(static_cast<Int>((word >> 11) + 1)), -53);
}

#if defined(__CUDA_ARCH__)
DTENSOR_HOST_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
DTENSOR_HOST_DEVICE double square_root(double x) { return __dsqrt_rn(x); }
#else
DTENSOR_HOST_DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
DTENSOR_HOST_DEVICE double square_root(double x) { return __builtin_sqrt(x); }
#endif

// Two normal numbers: Box and Muller, "A note on the generation of random normal deviates" (1958).
template <class C>
struct Pair {
  C first, second;
};
template <class C>
DTENSOR_HOST_DEVICE Pair<C> normal_pair(WordOf<C> a, WordOf<C> b) {
  const C radius = square_root(-2 * log_unit<C>(a));
  const auto angle = series_sincos<C>(b);
  return {radius * angle.cos, radius * angle.sin};
}

// -- What an operator draws: element(word), or pair(word, word) for two of them ----------------------------------------------

template <class C>
struct Floating {
  using Word = WordOf<C>;
  using Number = C;
};

// `Bits`: as many as the dtype that is written holds, so that rounding does not reach the upper end.
template <class C, int Bits>
struct Uniform : Floating<C> {
  C from, range;
  Uniform(double a, double b) : from(static_cast<C>(a)), range(static_cast<C>(b - a)) {}
  DTENSOR_HOST_DEVICE C element(WordOf<C> word) const { return unit<C, Bits>(word) * range + from; }
};

template <class C>
struct Exponential : Floating<C> {
  C scale;
  explicit Exponential(double lambda) : scale(static_cast<C>(1 / lambda)) {}
  DTENSOR_HOST_DEVICE C element(WordOf<C> word) const { return -log_unit<C>(word) * scale; }
};

// How many trials until one succeeds: `log_failure` is log(1 - p).
template <class C>
struct Geometric : Floating<C> {
  C scale;
  explicit Geometric(double log_failure) : scale(static_cast<C>(1 / log_failure)) {}
  DTENSOR_HOST_DEVICE C element(WordOf<C> word) const {
    const C trials = log_unit<C>(word) * scale;
    const C below = static_cast<C>(static_cast<typename FloatBits<C>::Int>(trials));
    const C above = below < trials ? below + 1 : below;
    return above < 1 ? C(1) : above;
  }
};

template <class C>
struct Cauchy : Floating<C> {
  C median, sigma;
  Cauchy(double m, double s) : median(static_cast<C>(m)), sigma(static_cast<C>(s)) {}
  DTENSOR_HOST_DEVICE C element(WordOf<C> word) const {
    const auto angle = series_sincos<C>(word >> 1);  // half a turn, without its begin
    return median + sigma * (angle.cos / (angle.sin == 0 ? C(1) : angle.sin));
  }
};

template <class C>
struct Normal : Floating<C> {
  C mean, std;
  Normal(double m, double s) : mean(static_cast<C>(m)), std(static_cast<C>(s)) {}
  DTENSOR_HOST_DEVICE Pair<C> pair(WordOf<C> a, WordOf<C> b) const {
    const auto z = normal_pair<C>(a, b);
    return {z.first * std + mean, z.second * std + mean};
  }
};

template <class C>
struct LogNormal : Floating<C> {
  C mean, std;
  LogNormal(double m, double s) : mean(static_cast<C>(m)), std(static_cast<C>(s)) {}
  DTENSOR_HOST_DEVICE Pair<C> pair(WordOf<C> a, WordOf<C> b) const {
    const auto z = normal_pair<C>(a, b);
    return {series_exp(z.first * std + mean), series_exp(z.second * std + mean)};
  }
};

// 1 with probability p.
struct Coin {
  using Word = uint32_t;
  using Number = uint32_t;
  uint64_t below;
  explicit Coin(double p) : below(static_cast<uint64_t>(p * 4294967296.0)) {}
  DTENSOR_HOST_DEVICE uint32_t element(uint32_t word) const { return word < below; }
};

// A whole number from `from`, of `range` of them (at most 2^32).
struct Whole32 {
  using Word = uint32_t;
  using Number = int64_t;
  int64_t from;
  uint64_t range;
  DTENSOR_HOST_DEVICE int64_t element(uint32_t word) const { return from + static_cast<int64_t>((word * range) >> 32); }
};
// The same of more; of all 64 bits when `range` is 0.
struct Whole64 {
  using Word = uint64_t;
  using Number = int64_t;
  int64_t from;
  uint64_t range;
  DTENSOR_HOST_DEVICE int64_t element(uint64_t word) const {
    return static_cast<int64_t>(static_cast<uint64_t>(from) + (range == 0 ? word : word % range));
  }
};

// -- Of one element ----------------------------------------------------------------------------------------------------------

template <class Numbers>
constexpr int kElementsOfBlock = 16 / sizeof(typename Numbers::Word);

template <class Word>
DTENSOR_HOST_DEVICE Word word_of(const PhiloxBlock& block, int k) {
  if constexpr (sizeof(Word) == 4) {
    return block.word[k];
  } else {
    return static_cast<uint64_t>(block.word[2 * k + 1]) << 32 | block.word[2 * k];
  }
}

// What the element of this index gets in a draw.
template <class Numbers>
DTENSOR_HOST_DEVICE typename Numbers::Number number_at(const Numbers& numbers, const CounterDraw& draw, int64_t index) {
  using Word = typename Numbers::Word;
  const auto block = philox4x32_10(draw.seed, static_cast<uint64_t>(index / kElementsOfBlock<Numbers>), draw.number);
  const int k = static_cast<int>(index % kElementsOfBlock<Numbers>);
  if constexpr (requires { numbers.element(0); }) {
    return numbers.element(word_of<Word>(block, k));
  } else {
    const auto pair = numbers.pair(word_of<Word>(block, k & ~1), word_of<Word>(block, k | 1));
    return k & 1 ? pair.second : pair.first;
  }
}

}  // namespace dtensor::rng
