// Which keys a query attends to, as a description: no mask of queries times keys is ever made.
//
//   auto mask = dt::AttentionMask::causal_documents();              // packed documents, each causal by itself
//   auto sequence = dt::PackedSequence({700, 1300, 48});            // of these lengths
//
// A description goes by positions in the sequence, not by where a row lies in memory: rows may be in any order and on any rank.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/placement.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// A sequence of documents that follow one another; or of one.
class PackedSequence {
 public:
  // Throws for no document, and for one of no or negative length.
  explicit PackedSequence(const std::vector<int64_t>& lengths);
  explicit PackedSequence(int64_t length) : PackedSequence(std::vector<int64_t>{length}) {}

  int64_t length() const { return begins_.back(); }
  int64_t documents() const { return static_cast<int64_t>(begins_.size()) - 1; }
  int64_t document_of(int64_t position) const;  // 0, 1, ...
  Interval document(int64_t d) const { return {begins_[d], begins_[d + 1]}; }
  bool operator==(const PackedSequence&) const = default;

 private:
  std::vector<int64_t> begins_;  // of the documents, and the end
};

class AttentionMask {
 public:
  // Whether a query attends to a key: their positions, and the numbers of their documents.
  using Predicate = std::function<bool(int64_t query, int64_t key, int64_t query_document, int64_t key_document)>;

  // Every key; keys up to the query.
  static AttentionMask full();
  static AttentionMask causal();
  // Keys at most `before` positions before the query and `after` after it. Here and below, any large number is as good as no limit.
  static AttentionMask sliding_window(int64_t before, int64_t after);
  static AttentionMask causal_sliding_window(int64_t before);
  // The first `globals` positions see all and are seen by all; the others have a window.
  static AttentionMask global_sliding_window(int64_t globals, int64_t before, int64_t after);
  // Keys of the query's own document; those up to the query.
  static AttentionMask documents();
  static AttentionMask causal_documents();
  // Causal, and the first `prefix` positions are seen by all. Of documents: each has its own prefix, one of `prefixes` for each.
  static AttentionMask prefix_lm(int64_t prefix);
  static AttentionMask prefix_lm_documents(std::vector<int64_t> prefixes);
  // Causal documents of which all but the first see the whole first one too: a question with many answers.
  static AttentionMask shared_question();
  // Causal documents, each of which also sees positions before it, one of `shared` for each, or none: answers to questions that stand once.
  static AttentionMask shared_runs(std::vector<Interval> shared);
  // Causal documents of which the last one sees all before it: examples and a test.
  static AttentionMask causal_blocks();
  // Each document in blocks of `block` positions; a query sees its own block and those before it.
  static AttentionMask block_causal_documents(int64_t block);
  // Any other. It is asked for every pair of a query and a key of two ranks, a few times. It must be safe to call from any thread. If it
  // throws, so does what asks it.
  static AttentionMask from(Predicate predicate, std::string name = "predicate");

  const std::string& name() const { return name_; }  // with its numbers: "causal_sliding_window(128)"

  bool allows(int64_t query, int64_t key, const PackedSequence& sequence) const;

  // What a query sees, in ascending order; none touch. Two at most for all masks but predicates, which have none of these.
  std::vector<Interval> seen_by(int64_t query, const PackedSequence& sequence) const;
  const Predicate* predicate() const { return predicate_ ? &predicate_ : nullptr; }

  // Whether it goes by documents, as those named so and all predicates do. The others see through them.
  bool reads_documents() const { return reads_documents_; }
  // Of prefix_lm_documents, and begins and ends of shared_runs.
  const std::vector<int64_t>& numbers() const { return numbers_; }

  // Throws where the sequence does not have what the mask speaks of (a number or run for each document, and runs before it).
  void check(const PackedSequence& sequence) const;

 private:
  using Seen = std::function<std::vector<Interval>(int64_t query, const PackedSequence& sequence)>;
  AttentionMask(std::string name, Seen seen, bool reads_documents = false)
      : name_(std::move(name)), seen_(std::move(seen)), reads_documents_(reads_documents) {}

  std::string name_;
  Seen seen_;
  Predicate predicate_;
  bool reads_documents_ = false;
  int64_t numbers_of_each_ = 0;  // document
  std::vector<int64_t> numbers_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline PackedSequence::PackedSequence(const std::vector<int64_t>& lengths) : begins_{0} {
  constexpr int64_t kMost = int64_t{1} << 48;
  require(!lengths.empty(), "PackedSequence", "got no documents; expected one or more");
  for (size_t d = 0; d < lengths.size(); ++d) {
    require(lengths[d] > 0 && lengths[d] <= kMost - begins_.back(), "PackedSequence",
            "document {} has {} positions; expected one or more, and 2^48 at most in all", d, lengths[d]);
    begins_.push_back(begins_.back() + lengths[d]);
  }
}

inline int64_t PackedSequence::document_of(int64_t position) const {
  return std::ranges::upper_bound(begins_, position) - begins_.begin() - 1;
}

namespace detail {

// The parts of these spans, two at most, that lie in the sequence, as spans that do not touch.
inline std::vector<Interval> joined(std::vector<Interval> spans, int64_t length) {
  for (auto& seen : spans) seen = {std::max<int64_t>(seen.begin, 0), std::min(seen.end, length)};
  std::erase_if(spans, [](const Interval& seen) { return seen.length() <= 0; });
  std::ranges::sort(spans, {}, &Interval::begin);
  if (spans.size() == 2 && spans[0].end >= spans[1].begin) spans = {{spans[0].begin, std::max(spans[0].end, spans[1].end)}};
  return spans;
}

inline Interval document_at(const PackedSequence& sequence, int64_t position) { return sequence.document(sequence.document_of(position)); }

// Larger than any position, and small enough for sums.
inline int64_t limited(int64_t number) { return std::min(number, int64_t{1} << 60); }

inline void check_not_negative(const std::string& name, std::initializer_list<int64_t> numbers) {
  for (const auto number : numbers) {
    require(number >= 0, "AttentionMask", "{} has a negative number; expected 0 or more; hint: a window of any width is `causal` or `full`",
            name);
  }
}

}  // namespace detail

inline AttentionMask AttentionMask::full() {
  return {"full", [](int64_t, const PackedSequence& s) { return std::vector<Interval>{{0, s.length()}}; }};
}

inline AttentionMask AttentionMask::causal() {
  return {"causal", [](int64_t q, const PackedSequence&) { return std::vector<Interval>{{0, q + 1}}; }};
}

inline AttentionMask AttentionMask::sliding_window(int64_t before, int64_t after) {
  const auto name = fmt::format("sliding_window({}, {})", before, after);
  detail::check_not_negative(name, {before, after});
  return {name, [before = detail::limited(before), after = detail::limited(after)](int64_t q, const PackedSequence&) {
            return std::vector<Interval>{{q - before, q + after + 1}};
          }};
}

inline AttentionMask AttentionMask::causal_sliding_window(int64_t before) {
  const auto name = fmt::format("causal_sliding_window({})", before);
  detail::check_not_negative(name, {before});
  auto mask = sliding_window(before, 0);
  mask.name_ = name;
  return mask;
}

inline AttentionMask AttentionMask::global_sliding_window(int64_t globals, int64_t before, int64_t after) {
  const auto name = fmt::format("global_sliding_window({}, {}, {})", globals, before, after);
  detail::check_not_negative(name, {globals, before, after});
  return {name, [globals, before = detail::limited(before), after = detail::limited(after)](int64_t q, const PackedSequence& s) {
            if (q < globals) return std::vector<Interval>{{0, s.length()}};
            return std::vector<Interval>{{0, globals}, {q - before, q + after + 1}};
          }};
}

inline AttentionMask AttentionMask::documents() {
  return {"documents", [](int64_t q, const PackedSequence& s) { return std::vector<Interval>{detail::document_at(s, q)}; },
          /*reads_documents=*/true};
}

inline AttentionMask AttentionMask::causal_documents() {
  return {"causal_documents", [](int64_t q, const PackedSequence& s) {
            return std::vector<Interval>{{detail::document_at(s, q).begin, q + 1}};
          }, /*reads_documents=*/true};
}

inline AttentionMask AttentionMask::prefix_lm(int64_t prefix) {
  AttentionMask mask(fmt::format("prefix_lm({})", prefix), [prefix](int64_t q, const PackedSequence&) {
    return std::vector<Interval>{{0, std::max(q + 1, prefix)}};
  });
  detail::check_not_negative(mask.name(), {prefix});
  return mask;
}

inline AttentionMask AttentionMask::prefix_lm_documents(std::vector<int64_t> prefixes) {
  for (auto& prefix : prefixes) {
    detail::check_not_negative("prefix_lm_documents", {prefix});
    prefix = detail::limited(prefix);
  }
  const auto seen = [prefixes](int64_t q, const PackedSequence& s) {
    const auto d = s.document_of(q);
    const auto [begin, end] = s.document(d);
    return std::vector<Interval>{{begin, std::max(q + 1, std::min(begin + prefixes[d], end))}};
  };
  AttentionMask mask("prefix_lm_documents", seen, /*reads_documents=*/true);
  mask.numbers_of_each_ = 1;
  mask.numbers_ = std::move(prefixes);
  return mask;
}

inline AttentionMask AttentionMask::shared_question() {
  return {"shared_question", [](int64_t q, const PackedSequence& s) {
            const auto d = s.document_of(q);
            std::vector<Interval> seen{{s.document(d).begin, q + 1}};
            if (d > 0) seen.push_back(s.document(0));
            return seen;
          }, /*reads_documents=*/true};
}

inline AttentionMask AttentionMask::shared_runs(std::vector<Interval> shared) {
  std::vector<int64_t> numbers;
  for (const auto& run : shared) {
    require(0 <= run.begin && run.begin <= run.end, "AttentionMask", "shared_runs has positions {} to {}; expected a run, or none",
            run.begin, run.end);
    numbers.insert(numbers.end(), {run.begin, run.end});
  }
  const auto seen = [shared = std::move(shared)](int64_t q, const PackedSequence& s) {
    const auto d = s.document_of(q);
    return std::vector<Interval>{shared[d], {s.document(d).begin, q + 1}};
  };
  AttentionMask mask("shared_runs", seen, /*reads_documents=*/true);
  mask.numbers_of_each_ = 2;
  mask.numbers_ = std::move(numbers);
  return mask;
}

inline AttentionMask AttentionMask::causal_blocks() {
  return {"causal_blocks", [](int64_t q, const PackedSequence& s) {
            const auto d = s.document_of(q);
            return std::vector<Interval>{{d + 1 == s.documents() ? 0 : s.document(d).begin, q + 1}};
          }, /*reads_documents=*/true};
}

inline AttentionMask AttentionMask::block_causal_documents(int64_t block) {
  require(block > 0, "AttentionMask", "got blocks of {} positions; expected one or more", block);
  return {fmt::format("block_causal_documents({})", block), [block = detail::limited(block)](int64_t q, const PackedSequence& s) {
            const auto [begin, end] = detail::document_at(s, q);
            return std::vector<Interval>{{begin, std::min(end, begin + ((q - begin) / block + 1) * block)}};
          }, /*reads_documents=*/true};
}

inline AttentionMask AttentionMask::from(Predicate predicate, std::string name) {
  require(predicate != nullptr, "AttentionMask", "got an empty function; expected one of two positions and two documents");
  AttentionMask mask(std::move(name), {}, /*reads_documents=*/true);
  mask.predicate_ = std::move(predicate);
  return mask;
}

inline std::vector<Interval> AttentionMask::seen_by(int64_t query, const PackedSequence& sequence) const {
  return seen_ ? detail::joined(seen_(query, sequence), sequence.length()) : std::vector<Interval>{};
}

inline bool AttentionMask::allows(int64_t query, int64_t key, const PackedSequence& sequence) const {
  if (predicate_) return predicate_(query, key, sequence.document_of(query), sequence.document_of(key));
  return std::ranges::any_of(seen_by(query, sequence), [&](const Interval& seen) { return seen.begin <= key && key < seen.end; });
}

inline void AttentionMask::check(const PackedSequence& sequence) const {
  if (numbers_of_each_ == 0) return;
  const auto documents = static_cast<int64_t>(numbers_.size()) / numbers_of_each_;
  require(documents == sequence.documents(), "AttentionMask",
          "{} has {} {} for {} documents; expected as many; hint: pack() the documents before order()", name_, documents,
          numbers_of_each_ == 1 ? "prefixes" : "runs", sequence.documents());
  for (int64_t d = 0; numbers_of_each_ == 2 && d < documents; ++d) {
    require(numbers_[2 * d + 1] <= sequence.document(d).begin || numbers_[2 * d] == numbers_[2 * d + 1], "AttentionMask",
            "document {} begins at {}, and shares positions {} to {}; expected them before it", d, sequence.document(d).begin,
            numbers_[2 * d], numbers_[2 * d + 1]);
  }
}

}  // namespace dtensor

#pragma GCC visibility pop
