// The ways in which tokens come to experts of other ranks, and what each sends.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// What a call of mix_experts on `ranks` ranks exchanges, as far as it is known before: `tokens` of each rank, with k experts each.
struct DispatchShape {
  int64_t ranks = 1, tokens = 0, dim = 0, k = 1, experts = 1;
  int64_t element_size = 4;
  bool whole = false;  // every rank has all tokens, and of the result too
  bool experts_choose = false;  // each its tokens, so that k is what a token has on average
};

// How many ranks have experts of a token that chooses k at random: N (1 - C(E - E/N, k) / C(E, k)). Where each expert chooses k / E of the
// tokens at random: N (1 - (1 - k/E)^(E/N)).
double expected_ranks(int64_t experts, int64_t ranks, int64_t k, bool experts_choose = false);

// The bytes that a rank sends to others in a forward pass, to the experts and back, when all experts are equally busy. Backward sends as
// many. Throws for a way that there is not.
double bytes_sent(const std::string& dispatch, const DispatchShape& shape);

// The way that takes the least time by these prices of the mesh dimensions that the ranks lie along; of equal ones the one that is named
// first: alltoall, deduplicated, allgather.
std::string cheapest_dispatch(const DispatchShape& shape, const std::vector<CommCost>& links);

// -- How ------------------------------------------------------------------------------------------------------------------

inline const std::vector<std::string>& dispatches() {
  static const std::vector<std::string> all{"alltoall", "deduplicated", "allgather"};
  return all;
}

inline void check_dispatch(const std::string& name) {
  require(name == "automatic" || std::ranges::find(dispatches(), name) != dispatches().end(), "mix_experts",
          "there is no way to dispatch called '{}'; expected alltoall, deduplicated, allgather or automatic", name);
}

inline double expected_ranks(int64_t experts, int64_t ranks, int64_t k, bool experts_choose) {
  const auto here = experts / std::max<int64_t>(ranks, 1);
  double none = 1;  // that a rank has none of them
  if (experts_choose) {
    none = std::pow(std::max(0.0, 1 - static_cast<double>(k) / static_cast<double>(experts)), static_cast<double>(here));
  } else {
    for (int64_t i = 0; i < k; ++i) none *= std::max(0.0, static_cast<double>(experts - here - i)) / static_cast<double>(experts - i);
  }
  return static_cast<double>(ranks) * (1 - none);
}

inline double bytes_sent(const std::string& dispatch, const DispatchShape& s) {
  check_dispatch(dispatch);
  const auto n = static_cast<double>(s.ranks), row = static_cast<double>(s.tokens * s.dim * s.element_size);
  const double others = (n - 1) / n, back_to_all = s.whole ? row * (n - 1) : 0;  // whole results are gathered
  if (dispatch == "alltoall") return 2 * row * static_cast<double>(s.k) * others + back_to_all;
  if (dispatch == "deduplicated") return 2 * row * expected_ranks(s.experts, s.ranks, s.k, s.experts_choose) * others + back_to_all;
  return 2 * row * (n - 1);  // gathered and reduce-scattered, or all-reduced
}

inline std::string cheapest_dispatch(const DispatchShape& shape, const std::vector<CommCost>& links) {
  CommCost slowest{0, 1e30, 1e30};
  for (const auto& link : links) {
    slowest.latency = std::max(slowest.latency, link.latency);
    slowest.bandwidth = std::min(slowest.bandwidth, link.bandwidth);
  }
  // Collectives of a forward pass: counts go first, and of deduplicated tokens their experts and weights travel too.
  const auto calls = [&](const std::string& way) { return way == "allgather" ? (shape.whole ? 1 : 2) : way == "alltoall" ? 3 : 5; };
  const auto seconds = [&](const std::string& way) { return calls(way) * slowest.latency + bytes_sent(way, shape) / slowest.bandwidth; };
  return *std::ranges::min_element(dispatches(), {}, seconds);
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
