// Which ranks work on which sequences, where lengths differ much: a long sequence is cut over many ranks, short ones stay whole.
//
//   auto plan = dt::plan_sequences(lengths, /*ranks=*/8, {.tokens_per_rank = 4096});
//   for (const auto& round : plan.rounds()) { ... }              // see docs/long_context.md
//
// As in ByteScale (Ge et al., 2025), whose greedy plan this is, and FlexSP (Wang et al., 2025), which searches for a better one.
#pragma once

#include <dtensor/parallel/context/orders.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// In any unit; all finite, and none negative. By default that of a position without attention, in a transformer of width 4096 on ranks
// whose links are a few thousand times slower than their products.
struct SequenceCost {
  double quadratic = 2e-5;  // of attention, for the square of a length: causal, 1 / (12 width)
  double linear = 1;        // of all else, for a position
  double message = 0.1;     // of keys and values that another rank gets, for a position; beside attention
  double fixed = 100;       // of a microbatch
  double host = 0;          // of copying to the host what a position saves for the backward pass, beside attention; 0: nothing is copied

  // What each of `ranks` takes that share a sequence.
  double seconds(int64_t length, int ranks) const {
    const auto s = static_cast<double>(length), d = static_cast<double>(ranks);
    return std::max(quadratic * s * s / d, message * s * (d - 1) / d) + linear * s / d;
  }
  // The share of what a sequence saves whose copies hide behind its attention: attention grows with the square of the length, and copies
  // with the length (as ByteScale's selective offloading).
  double share_on_host(int64_t length) const {
    return host > 0 ? std::min(kMostOnHost, quadratic * static_cast<double>(length) / host) : 0;
  }
  static constexpr double kMostOnHost = 0.9;  // some layers are always on the device
};

// A microbatch of the ranks [first, first + ranks), which share each of its sequences.
struct SequenceGroup {
  std::vector<int> sequences;
  int first = 0, ranks = 1;
};

struct SequencePlanOptions {
  // The most positions that a rank holds at once, to one for each sequence that it shares, without those whose share is on the host; 0, or
  // very many: any.
  int64_t tokens_per_rank = 0;
  SequenceCost cost{};
  // search: the best that is found, exact for few sequences. greedy: as many ranks as a length needs. static: all sequences are cut over as
  // many ranks as the longest one needs, the same groups in all microbatches.
  std::string by = "search";
};

// Of a round, what each rank works on at the same time as the others: documents that follow one another, and their positions by rank.
struct SequenceRound {
  std::vector<int> sequences;  // in the order in which they are packed
  PackedSequence packed;
  std::vector<context::Positions> rows;
  std::vector<double> on_host = {};  // the share of what each rank saves that goes to the host, for SavedOnHost (saved_on_host.hpp)
};

struct SequencePlan {
  std::vector<int64_t> lengths;
  std::vector<SequenceGroup> groups;  // a rank works on its own in this order
  std::vector<double> seconds;        // of each rank
  SequenceCost cost{};

  double makespan() const { return *std::ranges::max_element(seconds); }
  // Ranks that have fewer microbatches than others have no rows in the last rounds. Within a group each sequence is cut in zigzag order.
  std::vector<SequenceRound> rounds() const;
};

// Every rank makes it alike, from the same lengths. Groups have 1, 2, 4, ... ranks, or all. Throws for a sequence that does not fit on all
// ranks together, for costs that are not finite or negative, and for options that say nothing.
SequencePlan plan_sequences(const std::vector<int64_t>& lengths, int ranks, const SequencePlanOptions& options = {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace context::detail {

// Groups are aligned: of d ranks, a power of two, at a multiple of d; or all ranks. The larger ones work first. So all ranks of a group
// have done the same before it, and none waits, but for what else ranks do together in a round, such as gathering parameters.
class SequencePlanner {
 public:
  SequencePlanner(const std::vector<int64_t>& lengths, int ranks, const SequencePlanOptions& options)
      : lengths_(lengths), ranks_(ranks), options_(without_excess(options, lengths)), by_length_(lengths.size()) {
    std::iota(by_length_.begin(), by_length_.end(), 0);
    std::ranges::stable_sort(by_length_, std::greater<>(), [&](int i) { return lengths_[i]; });
    for (const auto length : lengths_) held_.push_back(held(length));
    for (size_t i = 0; i < lengths_.size(); ++i) least_.push_back(least_ranks(i));
  }

  SequencePlan greedy() const { return assigned(least_); }

  SequencePlan fixed() const {
    const int most = *std::ranges::max_element(least_);
    return assigned(std::vector<int>(lengths_.size(), most));
  }

  // Starts where every sequence takes at most some time, for several times, or where all have as many ranks, and then widens or narrows the
  // groups of neighbouring lengths as long as that helps.
  SequencePlan search() const {
    if (ranks_ == 1) return greedy();
    if (std::pow(2 * ranks_, lengths_.size()) <= kExact) return exact();
    auto degrees = least_;
    auto best = assigned(degrees);
    const double even = std::accumulate(best.seconds.begin(), best.seconds.end(), 0.0) / ranks_;
    for (double share = 0.1; share <= 1.5; share *= 1.2) {
      auto other = least_;
      for (size_t i = 0; i < other.size(); ++i) {
        while (other[i] < ranks_ && options_.cost.seconds(lengths_[i], other[i]) > share * even) other[i] = wider(other[i]);
      }
      keep_better(best, degrees, std::move(other));
    }
    const int most = *std::ranges::max_element(least_);
    for (int degree = 1; degree <= ranks_; degree = wider(degree)) {
      auto other = least_;
      for (auto& each : other) each = std::max(each, degree);
      keep_better(best, degrees, std::move(other));
      if (degree >= most) keep_better(best, degrees, std::vector<int>(lengths_.size(), degree));
    }
    const auto all = buckets();
    for (bool better = true; better;) {
      better = false;
      for (const auto& bucket : all) {
        for (int degree = 1; degree <= ranks_; degree = wider(degree)) {
          auto other = degrees;
          for (const int i : bucket) other[i] = std::max(least_[i], degree);
          better |= keep_better(best, degrees, std::move(other));
        }
      }
    }
    return best;
  }

 private:
  // No rank can hold more than all of them, and a smaller number can be multiplied.
  static SequencePlanOptions without_excess(SequencePlanOptions options, const std::vector<int64_t>& lengths) {
    options.tokens_per_rank = std::min(options.tokens_per_rank, std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
    return options;
  }

  static constexpr double kExact = 2e5;  // ways that are all tried
  static constexpr int kBuckets = 16;

  // The next larger group; past all ranks, one that there is not.
  int wider(int degree) const { return degree * 2 <= ranks_ || degree == ranks_ ? degree * 2 : ranks_; }

  // Positions that take the device's memory.
  int64_t held(int64_t length) const {
    return static_cast<int64_t>(std::ceil(static_cast<double>(length) * (1 - options_.cost.share_on_host(length))));
  }

  int least_ranks(size_t sequence) const {
    if (options_.tokens_per_rank == 0) return 1;
    int ranks = 1;
    while (ranks < ranks_ && ranks * options_.tokens_per_rank < held_[sequence]) ranks = wider(ranks);
    require(ranks * options_.tokens_per_rank >= held_[sequence], "plan_sequences",
            "a sequence of {} positions does not fit on {} ranks of {}; hint: more ranks, more tokens each, or copies to the host",
            lengths_[sequence], ranks_, options_.tokens_per_rank);
    return ranks;
  }

  // The open microbatch of a group, and how long its ranks have worked.
  struct Block {
    int group = -1;
    int64_t tokens = 0;
  };
  using Blocks = std::map<std::pair<int, int>, Block>;  // by ranks and first rank

  void add(SequencePlan& plan, Blocks& blocks, int sequence, int degree, int first) const {
    auto& block = blocks[{degree, first}];
    const bool full = options_.tokens_per_rank > 0 && block.tokens + held_[sequence] > options_.tokens_per_rank * degree;
    double seconds = options_.cost.seconds(lengths_[sequence], degree);
    if (block.group < 0 || full) {
      block = {static_cast<int>(plan.groups.size()), 0};
      plan.groups.push_back({{}, first, degree});
      seconds += options_.cost.fixed;
    }
    plan.groups[block.group].sequences.push_back(sequence);
    block.tokens += held_[sequence];
    for (int r = first; r < first + degree; ++r) plan.seconds[r] += seconds;
  }

  SequencePlan empty() const { return {lengths_, {}, std::vector<double>(ranks_, 0), options_.cost}; }

  // Wide groups first, and of one width the longest sequence first, each to the ranks that have least to do.
  SequencePlan assigned(const std::vector<int>& degrees) const {
    auto order = by_length_;
    std::ranges::stable_sort(order, std::greater<>(), [&](int i) { return degrees[i]; });
    auto plan = empty();
    Blocks blocks;
    for (const int i : order) {
      int best = 0;
      for (int first = degrees[i]; first + degrees[i] <= ranks_; first += degrees[i]) {
        if (plan.seconds[first] < plan.seconds[best]) best = first;
      }
      add(plan, blocks, i, degrees[i], best);
    }
    return plan;
  }

  bool keep_better(SequencePlan& best, std::vector<int>& degrees, std::vector<int> other) const {
    if (other == degrees) return false;
    auto plan = assigned(other);
    if (plan.makespan() >= best.makespan() * (1 - 1e-9)) return false;
    best = std::move(plan);
    degrees = std::move(other);
    return true;
  }

  // Of all widths and places of all sequences. Wide groups come first, whatever the order of choices.
  SequencePlan exact() const {
    auto best = assigned(least_);
    std::vector<std::pair<int, int>> chosen(lengths_.size());  // width, first rank
    const auto choose = [&](const auto& next, size_t i, const std::vector<double>& seconds) -> void {
      if (*std::ranges::max_element(seconds) >= best.makespan()) return;
      if (i == lengths_.size()) return keep_if_better(best, chosen);
      const int sequence = by_length_[i];
      for (int degree = least_[sequence]; degree <= ranks_; degree = wider(degree)) {
        for (int first = 0; first + degree <= ranks_; first += degree) {
          chosen[sequence] = {degree, first};
          auto after = seconds;
          for (int r = first; r < first + degree; ++r) after[r] += options_.cost.seconds(lengths_[sequence], degree);
          next(next, i + 1, after);
        }
      }
    };
    choose(choose, 0, std::vector<double>(ranks_, 0));
    return best;
  }

  void keep_if_better(SequencePlan& best, const std::vector<std::pair<int, int>>& chosen) const {
    auto order = by_length_;
    std::ranges::stable_sort(order, std::greater<>(), [&](int i) { return chosen[i].first; });
    auto plan = empty();
    Blocks blocks;
    for (const int i : order) add(plan, blocks, i, chosen[i].first, chosen[i].second);
    if (plan.makespan() < best.makespan()) best = std::move(plan);
  }

  // Sequences of like lengths, by dynamic programming: as little as possible is lost when each length is rounded up to the longest one of
  // its bucket.
  std::vector<std::vector<int>> buckets() const {
    std::vector<int64_t> values;  // distinct, descending
    std::vector<int64_t> count;
    for (const int i : by_length_) {
      if (values.empty() || values.back() != lengths_[i]) values.push_back(lengths_[i]), count.push_back(0);
      ++count.back();
    }
    const auto cuts = best_cuts(values, count);
    std::vector<std::vector<int>> result(cuts.size());
    for (const int i : by_length_) {
      const auto at = std::ranges::lower_bound(values, lengths_[i], std::greater<>()) - values.begin();
      result[std::ranges::upper_bound(cuts, at) - cuts.begin() - 1].push_back(i);
    }
    return result;
  }

  // Where buckets of values begin, of kBuckets at most; of very many values neighbours count as one.
  static std::vector<int64_t> best_cuts(const std::vector<int64_t>& values, const std::vector<int64_t>& count) {
    const auto n = static_cast<int64_t>(values.size()), step = std::max<int64_t>(1, n / 256), points = (n + step - 1) / step;
    std::vector<double> all(n + 1, 0), tokens(n + 1, 0);
    for (int64_t i = 0; i < n; ++i) {
      all[i + 1] = all[i] + static_cast<double>(count[i]);
      tokens[i + 1] = tokens[i] + static_cast<double>(count[i] * values[i]);
    }
    const auto at = [&](int64_t point) { return std::min(point * step, n); };
    const auto lost = [&](int64_t from, int64_t to) {
      return static_cast<double>(values[at(from)]) * (all[at(to)] - all[at(from)]) - (tokens[at(to)] - tokens[at(from)]);
    };
    const auto most = std::min<int64_t>(kBuckets, points);
    constexpr double kNever = std::numeric_limits<double>::infinity();
    std::vector<std::vector<double>> cost(most + 1, std::vector<double>(points + 1, kNever));
    std::vector<std::vector<int64_t>> from(most + 1, std::vector<int64_t>(points + 1, 0));
    cost[0][0] = 0;
    for (int64_t b = 1; b <= most; ++b) {
      for (int64_t end = 1; end <= points; ++end) {
        for (int64_t begin = 0; begin < end; ++begin) {
          const double now = cost[b - 1][begin] + lost(begin, end);
          if (now < cost[b][end]) cost[b][end] = now, from[b][end] = begin;
        }
      }
    }
    std::vector<int64_t> cuts;
    for (int64_t b = most, end = points; b > 0; --b) cuts.push_back(at(end = from[b][end]));
    std::ranges::reverse(cuts);
    return cuts;
  }

  const std::vector<int64_t>& lengths_;
  const int ranks_;
  const SequencePlanOptions options_;
  std::vector<int> by_length_, least_;
  std::vector<int64_t> held_;
};

}  // namespace context::detail

inline std::vector<SequenceRound> SequencePlan::rounds() const {
  const auto ranks = static_cast<int>(seconds.size());
  std::vector<int> next(ranks, 0);  // round of each rank
  std::vector<std::vector<const SequenceGroup*>> by_round;
  for (const auto& group : groups) {
    const int round = next[group.first];
    if (round == static_cast<int>(by_round.size())) by_round.emplace_back();
    by_round[round].push_back(&group);
    for (int r = group.first; r < group.first + group.ranks; ++r) next[r] = round + 1;
  }
  std::vector<SequenceRound> result;
  for (const auto& own : by_round) {
    std::vector<int> sequences;
    std::vector<int64_t> documents;
    std::vector<context::Positions> rows(ranks);
    std::vector<double> copied(ranks, 0);  // positions, then their share of the rank's
    int64_t begin = 0;
    for (const auto* group : own) {
      for (const int sequence : group->sequences) {
        const auto order = context::zigzag_order(lengths[sequence], group->ranks);
        for (int r = 0; r < group->ranks; ++r) {
          for (const auto position : order[r]) rows[group->first + r].push_back(begin + position);
          copied[group->first + r] += cost.share_on_host(lengths[sequence]) * static_cast<double>(order[r].size());
        }
        sequences.push_back(sequence);
        documents.push_back(lengths[sequence]);
        begin += lengths[sequence];
      }
    }
    for (int r = 0; r < ranks; ++r) copied[r] /= std::max<double>(1, static_cast<double>(rows[r].size()));
    result.push_back({std::move(sequences), PackedSequence(documents), std::move(rows), std::move(copied)});
  }
  return result;
}

namespace context::detail {

inline void check_cost(const SequenceCost& cost) {
  const std::pair<const char*, double> numbers[] = {
      {"quadratic", cost.quadratic}, {"linear", cost.linear}, {"message", cost.message}, {"fixed", cost.fixed}, {"host", cost.host}};
  for (const auto& [name, number] : numbers) {
    require(std::isfinite(number) && number >= 0, "plan_sequences",
            "got a {} cost of {}; expected a finite number, 0 or more; hint: costs may be in any unit, all in the same", name, number);
  }
}

}  // namespace context::detail

inline SequencePlan plan_sequences(const std::vector<int64_t>& lengths, int ranks, const SequencePlanOptions& options) {
  require(ranks >= 1 && !lengths.empty() && options.tokens_per_rank >= 0, "plan_sequences",
          "got {} sequences, {} ranks and {} tokens of each; expected one or more of each (0 tokens: any)", lengths.size(), ranks,
          options.tokens_per_rank);
  for (size_t i = 0; i < lengths.size(); ++i) {
    require(lengths[i] > 0, "plan_sequences", "sequence {} has {} positions; expected one or more", i, lengths[i]);
  }
  context::detail::check_cost(options.cost);
  const context::detail::SequencePlanner planner(lengths, ranks, options);
  if (options.by == "greedy") return planner.greedy();
  if (options.by == "static") return planner.fixed();
  require(options.by == "search", "plan_sequences", "there is no plan by '{}'; expected search, greedy or static", options.by);
  return planner.search();
}

}  // namespace dtensor

#pragma GCC visibility pop
