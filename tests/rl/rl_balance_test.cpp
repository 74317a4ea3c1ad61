// Sequences shared out: against all ways of sharing small numbers of them, and by what holds for any.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/balance.hpp>

#include <random>

using namespace dtensor;
using namespace dtensor::test;
using rl::Rows;

namespace {

const rl::WorkCost kBalanceTokens{.linear = 1, .quadratic = 0};

std::vector<int64_t> balance_lengths(std::mt19937_64& random, int64_t count, int64_t longest) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) lengths.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(longest)));
  return lengths;
}

double heaviest(const std::vector<Rows>& parts, const std::vector<int64_t>& lengths, const rl::WorkCost& cost) {
  double most = 0;
  for (const auto& part : parts) {
    double sum = 0;
    for (const auto row : part) sum += cost.of(lengths[row]);
    most = std::max(most, sum);
  }
  return most;
}

// Of all ways.
double best_balance(const std::vector<int64_t>& lengths, int64_t parts, const rl::WorkCost& cost, bool equal_counts) {
  int64_t ways = 1;
  for (size_t i = 0; i < lengths.size(); ++i) ways *= parts;
  double best = std::numeric_limits<double>::infinity();
  for (int64_t way = 0; way < ways; ++way) {
    std::vector<Rows> shared(parts);
    auto left = way;
    for (size_t i = 0; i < lengths.size(); ++i, left /= parts) shared[left % parts].push_back(static_cast<int64_t>(i));
    const auto [fewest, most] = std::ranges::minmax(shared, {}, [](const Rows& rows) { return rows.size(); });
    if (equal_counts && most.size() - fewest.size() > 1) continue;
    best = std::min(best, heaviest(shared, lengths, cost));
  }
  return best;
}

void require_each_once(const std::vector<Rows>& parts, size_t count) {
  Rows all;
  for (const auto& part : parts) {
    require(std::ranges::is_sorted(part), "test", "a part is not ascending");
    all.insert(all.end(), part.begin(), part.end());
  }
  std::ranges::sort(all);
  Rows expected(count);
  std::iota(expected.begin(), expected.end(), 0);
  require(all == expected, "test", "rows are missing or twice");
}

}  // namespace

TEST_CASE("rl balance: parts are nearly as even as the best of all ways", "[rl]") {
  std::mt19937_64 random(4);
  const rl::WorkCost attention{.linear = 1, .quadratic = 0.1};
  double worst = 1, sum = 0, worst_equal = 1;
  int64_t best = 0, cases = 0;
  for (int round = 0; round < 150; ++round) {
    const auto parts = 2 + round % 3;
    const auto lengths = balance_lengths(random, 1 + round % (parts == 2 ? 9 : 7), 30);
    for (const auto& cost : {kBalanceTokens, attention}) {
      for (const bool equal : {false, true}) {
        const auto got = rl::balance(lengths, parts, {cost, equal});
        REQUIRE_NOTHROW(require_each_once(got, lengths.size()));
        const auto ratio = heaviest(got, lengths, cost) / best_balance(lengths, parts, cost, equal);
        CHECK(ratio >= 1 - 1e-12);
        (equal ? worst_equal : worst) = std::max(equal ? worst_equal : worst, ratio);
        if (equal) continue;
        sum += ratio;
        best += ratio < 1 + 1e-12;
        ++cases;
      }
    }
  }
  INFO("worst " << worst << ", of equal counts " << worst_equal << ", mean " << sum / cases << ", best in " << best << " of " << cases);
  CHECK(worst < 4.0 / 3);
  CHECK(worst_equal < 1.5);
  CHECK(sum / cases < 1.02);
  CHECK(best > cases * 3 / 4);
}

TEST_CASE("rl balance: many sequences", "[rl]") {
  std::mt19937_64 random(5);
  const auto lengths = balance_lengths(random, 1003, 4096);
  for (const bool equal : {false, true}) {
    const auto parts = rl::balance(lengths, 8, {{}, equal});
    REQUIRE_NOTHROW(require_each_once(parts, lengths.size()));
    double all = 0;
    for (const auto length : lengths) all += rl::WorkCost{}.of(length);
    CHECK(heaviest(parts, lengths, {}) < 1.001 * all / 8);
    if (!equal) continue;
    for (const auto& part : parts) CHECK((part.size() == 125 || part.size() == 126));
  }
  CHECK(rl::balance(lengths, 8) == rl::balance(lengths, 8));
  CHECK(rl::balance({}, 3) == std::vector<Rows>(3));
  CHECK(rl::balance({7, 7, 7}, 3) == rl::balance({9, 9, 9}, 3));
  REQUIRE_NOTHROW(require_each_once(rl::balance({0, 0, 5}, 5), 3));
}

TEST_CASE("rl balance: microbatches stay within their tokens", "[rl]") {
  std::mt19937_64 random(6);
  for (const int64_t count : {0, 1, 3, 40, 200}) {
    const auto lengths = balance_lengths(random, count, 100);
    const auto all = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    for (const int64_t tokens : {100, 170, 1000, 100'000}) {
      const auto parts = rl::microbatches_by_tokens(lengths, tokens);
      REQUIRE_NOTHROW(require_each_once(parts, lengths.size()));
      CHECK(heaviest(parts, lengths, kBalanceTokens) <= static_cast<double>(tokens));
      if (tokens == 1000) CHECK(static_cast<int64_t>(parts.size()) <= all / tokens + 2);
      CHECK(rl::microbatches_by_tokens(lengths, tokens, 5, 4).size() % 4 == 0);
      CHECK(rl::microbatches_by_tokens(lengths, tokens, 5, 4).size() >= 5);
      const auto by_rank = rl::balanced_microbatches(lengths, 4, tokens);
      std::vector<Rows> joined;
      for (const auto& own : by_rank) {
        CHECK(own.size() == by_rank[0].size());
        joined.insert(joined.end(), own.begin(), own.end());
      }
      REQUIRE_NOTHROW(require_each_once(joined, lengths.size()));
      CHECK(heaviest(joined, lengths, kBalanceTokens) <= static_cast<double>(tokens));
    }
  }
}

TEST_CASE("rl balance: what cannot be shared out is refused", "[rl]") {
  CHECK_NOTHROW(refuses("got 0 parts", [] { rl::balance({1}, 0); }));
  CHECK_NOTHROW(refuses("sequence 1 has length -2", [] { rl::balance({1, -2}, 2); }));
  CHECK_NOTHROW(refuses("sequence 1 has 9 tokens; expected at most 8", [] { rl::microbatches_by_tokens({1, 9}, 8); }));
}
