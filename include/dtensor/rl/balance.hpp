// Sequences of very different lengths, shared out so that ranks, or microbatches, have equal work.
//
//   const auto parts = rl::balance(lengths, dp);                          // part r: rows for rank r
//   const auto steps = rl::microbatches_by_tokens(lengths, 16384);        // rows of each microbatch
#pragma once

#include <dtensor/rl/rows.hpp>

#include <algorithm>
#include <numeric>
#include <queue>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What a sequence costs: linear * length + quadratic * length^2, in any unit.
struct WorkCost {
  double linear = 1;
  double quadratic = 1.0 / 24576;  // attention beside all else in a transformer of width 4096: 1 / (6 width)

  double of(int64_t length) const { return (linear + quadratic * static_cast<double>(length)) * static_cast<double>(length); }
};

struct BalanceOptions {
  WorkCost cost{};
  bool equal_counts = false;  // parts have as many sequences, or one less where they do not divide
};

// Shares sequences out over `parts` by the largest differencing method (Karmarkar and Karp, 1982): the two partial solutions that are least
// even are joined, the heaviest part of one with the lightest of the other, until one is left. Gives the rows of each part, ascending; a
// part may be empty. A row is in exactly one. The same on every rank, for the same lengths. Throws for no parts and negative lengths.
std::vector<Rows> balance(const std::vector<int64_t>& lengths, int64_t parts, const BalanceOptions& options = {});

// As few balanced parts, of at most `tokens` together each, as the method finds; at least `at_least`, and a multiple of `multiple_of` (of
// pipelines). Parts may be empty only where there are fewer sequences than parts. Throws for a sequence that is longer.
std::vector<Rows> microbatches_by_tokens(const std::vector<int64_t>& lengths, int64_t tokens, int64_t at_least = 1,
                                         int64_t multiple_of = 1);

// Both: microbatches of every rank, [ranks][microbatches], of at most `tokens` each, and as many on all ranks.
std::vector<std::vector<Rows>> balanced_microbatches(const std::vector<int64_t>& lengths, int64_t ranks, int64_t tokens,
                                                     const BalanceOptions& options = {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kBalance = "rl::balance";

// Parts of some of the sequences, the heaviest first.
struct Partition {
  struct Part {
    double cost = 0;
    Rows rows{};
  };
  std::vector<Part> parts;
  int64_t made = 0;  // of two that are as uneven, the one made first is joined first

  double spread() const { return parts.front().cost - parts.back().cost; }
  bool operator<(const Partition& other) const { return spread() != other.spread() ? spread() < other.spread() : made > other.made; }

  void sort() { std::ranges::stable_sort(parts, std::greater<>(), &Part::cost); }
  void join(const Partition& other) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto& light = other.parts[parts.size() - 1 - i];
      parts[i].cost += light.cost;
      parts[i].rows.insert(parts[i].rows.end(), light.rows.begin(), light.rows.end());
    }
    sort();
  }
};

// The partial solutions to begin with: one for each sequence, or for each `parts` of them, one in each part. A row of -1 is no sequence.
inline std::vector<Partition> first_partitions(const std::vector<std::pair<double, int64_t>>& ascending, int64_t parts, bool equal_counts) {
  std::vector<Partition> all;
  const auto stride = equal_counts ? parts : 1;
  for (size_t i = 0; i < ascending.size(); i += stride) {
    Partition one{std::vector<Partition::Part>(parts), static_cast<int64_t>(all.size())};
    for (int64_t p = 0; p < stride; ++p) {
      const auto& [cost, row] = ascending[i + p];
      one.parts[p].cost = cost;
      if (row >= 0) one.parts[p].rows.push_back(row);
    }
    one.sort();
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace detail

inline std::vector<Rows> balance(const std::vector<int64_t>& lengths, int64_t parts, const BalanceOptions& options) {
  require(parts >= 1, detail::kBalance, "got {} parts; expected 1 or more", parts);
  std::vector<std::pair<double, int64_t>> ascending;
  for (size_t row = 0; row < lengths.size(); ++row) {
    require(lengths[row] >= 0, detail::kBalance, "sequence {} has length {}; expected 0 or more", row, lengths[row]);
    ascending.emplace_back(options.cost.of(lengths[row]), static_cast<int64_t>(row));
  }
  while (options.equal_counts && static_cast<int64_t>(ascending.size()) % parts != 0) ascending.emplace_back(0, -1);
  std::ranges::sort(ascending);
  if (ascending.empty()) return std::vector<Rows>(parts);

  auto partitions = detail::first_partitions(ascending, parts, options.equal_counts);
  auto made = static_cast<int64_t>(partitions.size());
  std::priority_queue<detail::Partition> queue({}, std::move(partitions));
  while (queue.size() > 1) {
    auto joined = queue.top();
    queue.pop();
    joined.join(queue.top());
    queue.pop();
    joined.made = made++;
    queue.push(std::move(joined));
  }
  std::vector<Rows> result;
  for (const auto& part : queue.top().parts) {
    result.push_back(part.rows);
    std::ranges::sort(result.back());
  }
  return result;
}

inline std::vector<Rows> microbatches_by_tokens(const std::vector<int64_t>& lengths, int64_t tokens, int64_t at_least,
                                                int64_t multiple_of) {
  require(tokens >= 1 && at_least >= 0 && multiple_of >= 1, detail::kBalance, "got {} tokens, at least {} parts, a multiple of {}", tokens,
          at_least, multiple_of);
  int64_t all = 0;
  for (size_t row = 0; row < lengths.size(); ++row) {
    require(lengths[row] <= tokens, detail::kBalance, "sequence {} has {} tokens; expected at most {}, the budget of a microbatch", row,
            lengths[row], tokens);
    all += lengths[row];
  }
  const auto up = [&](int64_t parts) { return (parts + multiple_of - 1) / multiple_of * multiple_of; };
  const auto sum_of = [&](const Rows& rows) {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0}, [&](int64_t sum, int64_t row) { return sum + lengths[row]; });
  };
  for (auto parts = up(std::max({at_least, (all + tokens - 1) / tokens, int64_t{1}}));; parts = up(parts + 1)) {
    auto found = balance(lengths, parts, {.cost = {.linear = 1, .quadratic = 0}});
    if (std::ranges::all_of(found, [&](const Rows& rows) { return sum_of(rows) <= tokens; })) return found;
  }
}

inline std::vector<std::vector<Rows>> balanced_microbatches(const std::vector<int64_t>& lengths, int64_t ranks, int64_t tokens,
                                                            const BalanceOptions& options) {
  const auto shares = balance(lengths, ranks, options);
  std::vector<std::vector<Rows>> all(ranks);
  int64_t most = 1;
  for (bool alike = false; !alike;) {
    for (int64_t r = 0; r < ranks; ++r) {
      std::vector<int64_t> own;
      for (const auto row : shares[r]) own.push_back(lengths[row]);
      all[r] = microbatches_by_tokens(own, tokens, most);
      for (auto& rows : all[r]) {
        for (auto& row : rows) row = shares[r][row];
      }
    }
    alike = true;
    for (const auto& own : all) {
      alike = alike && own.size() == all[0].size();
      most = std::max(most, static_cast<int64_t>(own.size()));
    }
  }
  return all;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
