// Which positions each rank has, so that all have the same work.
#pragma once

#include <dtensor/parallel/context/plan.hpp>

#include <numeric>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Of `ranks` ranks, by rank: neighbouring positions, lengths as of Shard. Under a causal mask the last ranks have most of the work.
std::vector<Positions> contiguous_order(int64_t length, int ranks);

// Each rank has a piece of the first half and its mirror image in the second one. Exactly even for a causal mask whose length is a multiple
// of 2 * ranks.
std::vector<Positions> zigzag_order(int64_t length, int ranks);

// Every `ranks`-th position, or block of `block` positions.
std::vector<Positions> striped_order(int64_t length, int ranks, int64_t block = 1);

// Blocks of `block` positions, each given to the rank that has the least work under the mask, the longest first; every rank gets as many
// positions as in contiguous_order, to a block. For any mask.
std::vector<Positions> balanced_order(const AttentionMask& mask, const PackedSequence& sequence, int ranks, int64_t block = 128);

// One of these by name: contiguous, zigzag, stripes or balanced. Throws for another one.
std::vector<Positions> rows_by_name(const std::string& order, const AttentionMask& mask, const PackedSequence& sequence, int ranks);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline void check_order(int64_t length, int ranks, int64_t block) {
  require(length >= 0 && ranks >= 1 && block >= 1, "ContextPlan", "got {} positions, {} ranks and blocks of {}", length, ranks, block);
}

// `chunks` pieces of the positions, of lengths that differ by one at most.
inline std::vector<Interval> even_pieces(int64_t length, int64_t chunks) {
  std::vector<Interval> pieces;
  for (int64_t i = 0; i < chunks; ++i) pieces.push_back({length * i / chunks, length * (i + 1) / chunks});
  return pieces;
}

inline void append(Positions& positions, const Interval& piece) {
  for (auto position = piece.begin; position < piece.end; ++position) positions.push_back(position);
}

}  // namespace detail

inline std::vector<Positions> contiguous_order(int64_t length, int ranks) {
  detail::check_order(length, ranks, 1);
  std::vector<Positions> rows(ranks);
  for (int r = 0; r < ranks; ++r) {
    for (const auto& piece : cut(length, shard(0), ranks, r)) detail::append(rows[r], piece);
  }
  return rows;
}

inline std::vector<Positions> zigzag_order(int64_t length, int ranks) {
  detail::check_order(length, ranks, 1);
  std::vector<Positions> rows(ranks);
  const auto pieces = detail::even_pieces(length, 2 * ranks);
  for (int r = 0; r < ranks; ++r) {
    detail::append(rows[r], pieces[r]);
    detail::append(rows[r], pieces[2 * ranks - 1 - r]);
  }
  return rows;
}

inline std::vector<Positions> striped_order(int64_t length, int ranks, int64_t block) {
  detail::check_order(length, ranks, block);
  std::vector<Positions> rows(ranks);
  for (int64_t begin = 0, i = 0; begin < length; begin += block, ++i) {
    detail::append(rows[i % ranks], {begin, std::min(begin + block, length)});
  }
  return rows;
}

inline std::vector<Positions> balanced_order(const AttentionMask& mask, const PackedSequence& sequence, int ranks, int64_t block) {
  const auto length = sequence.length();
  detail::check_order(length, ranks, block);
  mask.check(sequence);
  Positions all(length);
  std::iota(all.begin(), all.end(), int64_t{0});
  struct Piece {
    Interval positions;
    int64_t work;
  };
  std::vector<Piece> pieces;
  for (int64_t begin = 0; begin < length; begin += block) {
    const Interval positions{begin, std::min(begin + block, length)};
    const std::span<const int64_t> queries(all.data() + begin, positions.length());
    pieces.push_back({positions, BlockMask(mask, sequence, queries, all).cells()});
  }
  std::ranges::stable_sort(pieces, std::greater<>(), &Piece::work);
  const auto most = (static_cast<int64_t>(pieces.size()) + ranks - 1) / ranks;
  std::vector<Positions> rows(ranks);
  std::vector<int64_t> work(ranks, 0), count(ranks, 0);
  for (const auto& piece : pieces) {
    int least = -1;
    for (int r = 0; r < ranks; ++r) {
      if (count[r] < most && (least < 0 || work[r] < work[least])) least = r;
    }
    work[least] += piece.work;
    ++count[least];
    detail::append(rows[least], piece.positions);
  }
  for (auto& positions : rows) std::ranges::sort(positions);
  return rows;
}

inline std::vector<Positions> rows_by_name(const std::string& order, const AttentionMask& mask, const PackedSequence& sequence, int ranks) {
  if (order == "contiguous") return contiguous_order(sequence.length(), ranks);
  if (order == "zigzag") return zigzag_order(sequence.length(), ranks);
  if (order == "stripes") return striped_order(sequence.length(), ranks);
  if (order == "balanced") return balanced_order(mask, sequence, ranks);
  fail("ContextParallel", "there is no order '{}'; expected contiguous, zigzag, stripes or balanced", order);
}

}  // namespace dtensor::context

#pragma GCC visibility pop
