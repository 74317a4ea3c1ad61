// A mask between some rows of queries and some rows of keys, as those of two ranks: which of them meet.
#pragma once

#include <dtensor/parallel/context/mask.hpp>

#include <span>

#pragma GCC visibility push(default)

namespace dtensor::context {

using Positions = std::vector<int64_t>;  // of a rank's rows, ascending

// What there is between a tile of queries and a tile of keys.
enum class Cover { none, some, all };

class BlockMask {
 public:
  // The rows have these positions of the sequence, in ascending order. A predicate is asked for all pairs, here. Takes memory for the keys
  // that each query sees, in runs.
  BlockMask(const AttentionMask& mask, const PackedSequence& sequence, std::span<const int64_t> queries, std::span<const int64_t> keys);

  int64_t queries() const { return static_cast<int64_t>(first_.size()) - 1; }
  int64_t cells() const { return cells_; }  // pairs that meet: what the block costs

  // Of rows `q` and `k`.
  Cover cover(const Interval& q, const Interval& k) const;
  // Writes [q.length(), k.length()], row-major: true where a query does not see a key.
  void write_hidden(const Interval& q, const Interval& k, bool* hidden) const;
  // The rows of keys that a query sees, in runs.
  std::span<const Interval> seen_by(int64_t query) const { return {runs_.data() + first_[query], runs_.data() + first_[query + 1]}; }

 private:
  void add_by_spans(const AttentionMask& mask, const PackedSequence& sequence, int64_t query, std::span<const int64_t> keys);
  void add_by_predicate(const AttentionMask& mask, const PackedSequence& sequence, int64_t query, std::span<const int64_t> keys);

  int64_t keys_ = 0, cells_ = 0;
  std::vector<Interval> runs_;
  std::vector<size_t> first_{0};  // of each query in runs_, and the end
};

// Whether any of these queries sees any of these keys.
bool any_meet(const AttentionMask& mask, const PackedSequence& sequence, std::span<const int64_t> queries, std::span<const int64_t> keys);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Where there is none: no length, at the begin of `b`.
inline Interval overlap(const Interval& a, const Interval& b) {
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.begin < both.end ? both : Interval{b.begin, b.begin};
}

// Of a predicate.
inline bool answer(const AttentionMask& mask, int64_t query, int64_t key, int64_t query_document, int64_t key_document) try {
  return (*mask.predicate())(query, key, query_document, key_document);
} catch (const std::exception& error) {
  fail("AttentionMask", "'{}' threw for query {} and key {}: {}; hint: it must answer for every pair", mask.name(), query, key,
       error.what());
}

}  // namespace detail

inline BlockMask::BlockMask(const AttentionMask& mask, const PackedSequence& sequence, std::span<const int64_t> queries,
                            std::span<const int64_t> keys)
    : keys_(static_cast<int64_t>(keys.size())) {
  for (const auto query : queries) {
    mask.predicate() ? add_by_predicate(mask, sequence, query, keys) : add_by_spans(mask, sequence, query, keys);
    first_.push_back(runs_.size());
  }
  for (const auto& run : runs_) cells_ += run.length();
}

inline void BlockMask::add_by_spans(const AttentionMask& mask, const PackedSequence& sequence, int64_t query,
                                    std::span<const int64_t> keys) {
  const auto row = [&](int64_t position) { return std::ranges::lower_bound(keys, position) - keys.begin(); };
  for (const auto& span : mask.seen_by(query, sequence)) {
    const Interval run{row(span.begin), row(span.end)};
    if (run.length() > 0) runs_.push_back(run);
  }
}

inline void BlockMask::add_by_predicate(const AttentionMask& mask, const PackedSequence& sequence, int64_t query,
                                        std::span<const int64_t> keys) {
  const auto document = sequence.document_of(query);
  for (int64_t k = 0; k < keys_; ++k) {
    if (!detail::answer(mask, query, keys[k], document, sequence.document_of(keys[k]))) continue;
    if (runs_.size() > first_.back() && runs_.back().end == k) ++runs_.back().end;
    else runs_.push_back({k, k + 1});
  }
}

inline Cover BlockMask::cover(const Interval& q, const Interval& k) const {
  bool any = false, all = true;
  for (int64_t query = q.begin; query < q.end; ++query) {
    int64_t met = 0;
    for (const auto& run : seen_by(query)) met += detail::overlap(run, k).length();
    any |= met > 0;
    all &= met == k.length();
  }
  return !any ? Cover::none : all ? Cover::all : Cover::some;
}

inline void BlockMask::write_hidden(const Interval& q, const Interval& k, bool* hidden) const {
  for (int64_t query = q.begin; query < q.end; ++query, hidden += k.length()) {
    std::fill_n(hidden, k.length(), true);
    for (const auto& run : seen_by(query)) {
      const auto met = detail::overlap(run, k);
      std::fill_n(hidden + (met.begin - k.begin), met.length(), false);
    }
  }
}

inline bool any_meet(const AttentionMask& mask, const PackedSequence& sequence, std::span<const int64_t> queries,
                     std::span<const int64_t> keys) {
  if (keys.empty()) return false;
  return std::ranges::any_of(queries, [&](int64_t query) {
    if (mask.predicate()) return BlockMask(mask, sequence, {&query, 1}, keys).cells() > 0;
    return std::ranges::any_of(mask.seen_by(query, sequence), [&](const Interval& span) {
      const auto first = std::ranges::lower_bound(keys, span.begin);
      return first != keys.end() && *first < span.end;
    });
  });
}

}  // namespace dtensor::context

#pragma GCC visibility pop
