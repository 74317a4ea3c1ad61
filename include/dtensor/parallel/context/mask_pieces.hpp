// A mask between two lists of rows, as rectangles and triangles: what a kernel that knows only these two computes.
#pragma once

#include <dtensor/parallel/context/block_mask.hpp>

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Queries that see all of these keys, or, where it is causal, of which the i-th sees the first i + 1, of as many keys as queries.
struct MaskPiece {
  Interval queries, keys;
  bool causal = false;
  bool operator==(const MaskPiece&) const = default;
};

// All that the mask shows, each pair in one piece. Nothing where that takes more than `most` pieces, as windows do.
std::optional<std::vector<MaskPiece>> pieces_of(const BlockMask& mask, int64_t most);

// A mask, and what it falls into where these are few: found once, for all calls.
struct MaskInPieces {
  explicit MaskInPieces(BlockMask m) : mask(std::move(m)), pieces(pieces_of(mask, /*most=*/8 + mask.queries() / 128)) {}
  const BlockMask mask;
  const std::optional<std::vector<MaskPiece>> pieces;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Neighbouring queries of which each run of keys ends where it ends for the query before, or one key later.
class QueryGroup {
 public:
  QueryGroup(const BlockMask& mask, int64_t first) : mask_(mask), queries_{first, first + 1}, grows_(mask.seen_by(first).size(), false) {}

  // Whether the next query belongs to it, which then is part of it.
  bool take_next() {
    const auto first = mask_.seen_by(queries_.begin), next = mask_.seen_by(queries_.end);
    if (first.size() != next.size()) return false;
    std::vector<bool> grows;
    for (size_t r = 0; r < first.size(); ++r) {
      const auto more = next[r].end - first[r].end;
      if (next[r].begin != first[r].begin || (more != 0 && more != queries_.length())) return false;
      grows.push_back(more > 0);
    }
    if (queries_.length() > 1 && grows != grows_) return false;
    grows_ = std::move(grows);
    ++queries_.end;
    return true;
  }

  void append_to(std::vector<MaskPiece>& pieces) const {
    const auto first = mask_.seen_by(queries_.begin);
    for (size_t r = 0; r < first.size(); ++r) {
      const auto [begin, end] = first[r];
      if (const Interval before{begin, grows_[r] ? end - 1 : end}; before.length() > 0) pieces.push_back({queries_, before});
      if (grows_[r]) pieces.push_back({queries_, {end - 1, end - 1 + queries_.length()}, /*causal=*/true});
    }
  }

  int64_t end() const { return queries_.end; }

 private:
  const BlockMask& mask_;
  Interval queries_;
  std::vector<bool> grows_;
};

}  // namespace detail

inline std::optional<std::vector<MaskPiece>> pieces_of(const BlockMask& mask, int64_t most) {
  std::vector<MaskPiece> pieces;
  for (int64_t query = 0; query < mask.queries();) {
    detail::QueryGroup group(mask, query);
    while (group.end() < mask.queries() && group.take_next()) {
    }
    group.append_to(pieces);
    if (static_cast<int64_t>(pieces.size()) > most) return {};
    query = group.end();
  }
  return pieces;
}

}  // namespace dtensor::context

#pragma GCC visibility pop
