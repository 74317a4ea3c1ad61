// Random numbers that are the same on every platform: the distributions of the standard library are not.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace dtensor::fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed * 0x9e3779b97f4a7c15ull + 1) { bits_.discard(8); }

  int64_t below(int64_t n) { return static_cast<int64_t>(bits_() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  bool chance(int percent) { return below(100) < percent; }

  template <class T>
  T one_of(std::initializer_list<T> all) { return all.begin()[below(static_cast<int64_t>(all.size()))]; }
  template <class T>
  const T& one_of(const std::vector<T>& all) { return all[below(static_cast<int64_t>(all.size()))]; }

  // An index, with the given weights.
  template <class Weights>
  int64_t weighted(const Weights& weights) {
    int64_t total = 0, i = 0;
    for (const int64_t weight : weights) total += weight;
    int64_t left = below(total);
    for (const int64_t weight : weights) {
      if (left < weight) break;
      left -= weight, ++i;
    }
    return i;
  }

 private:
  std::mt19937_64 bits_;
};

}  // namespace dtensor::fuzz
