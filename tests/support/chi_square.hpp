// Whether draws have a law.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace dtensor::test {

// Pearson's statistic of `counts` under `probabilities`, divided by its 0.999 quantile (by Wilson and Hilferty): below 1 where the counts
// are as they should be. What is expected less than 5 times is taken together. Infinite where something was drawn that has no probability.
inline double chi_square_ratio(const std::vector<int64_t>& counts, const std::vector<double>& probabilities) {
  double draws = 0, statistic = 0, freedom = -1, rare_count = 0, rare_mean = 0;
  for (const auto count : counts) draws += static_cast<double>(count);
  const auto add = [&](double count, double mean) {
    statistic += (count - mean) * (count - mean) / mean;
    ++freedom;
  };
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto count = static_cast<double>(counts[i]), mean = probabilities[i] * draws;
    if (mean == 0 && count > 0) return std::numeric_limits<double>::infinity();
    if (mean >= 5) {
      add(count, mean);
    } else {
      rare_count += count;
      rare_mean += mean;
    }
  }
  if (rare_mean > 0) add(rare_count, rare_mean);
  const auto a = 2 / (9 * freedom);
  return statistic / (freedom * std::pow(1 - a + 3.0902 * std::sqrt(a), 3));
}

}  // namespace dtensor::test
