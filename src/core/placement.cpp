// Placements: how they print, and which part of a dimension a shard is.
#include <dtensor/error.hpp>
#include <dtensor/placement.hpp>

#include <algorithm>
#include <ostream>

namespace dtensor {

namespace {

// The range of the middle part of (split, middle, unit) that is part `index`: as torch.chunk cuts it.
Interval chunk(int64_t middle, int64_t parts, int64_t index) {
  const int64_t each = (middle + parts - 1) / parts;
  const int64_t begin = std::min(index * each, middle);
  return {begin, std::min(begin + each, middle)};
}

int64_t middle_length(int64_t length, const Placement& placement) {
  const int64_t block = placement.split * placement.unit;
  if (placement.split < 1 || placement.unit < 1 || length % block != 0) {
    fail("placement",
         "{} cannot cut a dimension of length {}; expected a multiple of split*unit = {}; hint: choose a split that "
         "divides "
         "the dimension",
         placement.str(), length, block);
  }
  return length / block;
}

}  // namespace

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::avg: return "avg";
    case ReduceOp::product: return "product";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::norm2: return "norm2";
  }
  return "?";
}

std::string Placement::str() const {
  if (is_replicate()) return "R";
  if (is_partial()) return fmt::format("P({})", name(op));
  std::string text = fmt::format("S({}", dim);
  if (split != 1) text += fmt::format(", split={}", split);
  if (unit != 1) text += fmt::format(", unit={}", unit);
  return text + ")";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << placement.str(); }

std::ostream& operator<<(std::ostream& out, const Interval& interval) {
  return out << '[' << interval.begin << ", " << interval.end << ')';
}

std::string str(PlacementsRef placements) {
  std::string text;
  for (const auto& placement : placements) text += (text.empty() ? "" : ", ") + placement.str();
  return "(" + text + ")";
}

Intervals cut(int64_t length, const Placement& placement, int64_t parts, int64_t index) {
  const int64_t middle = middle_length(length, placement);
  const auto part = chunk(middle, parts, index);
  Intervals result;
  for (int64_t s = 0; s < placement.split && part.length() > 0; ++s) {
    const Interval next{(s * middle + part.begin) * placement.unit, (s * middle + part.end) * placement.unit};
    if (!result.empty() && result.back().end == next.begin) {
      result.back().end = next.end;
    } else {
      result.push_back(next);
    }
  }
  return result;
}

int64_t cut_length(int64_t length, const Placement& placement, int64_t parts, int64_t index) {
  return chunk(middle_length(length, placement), parts, index).length() * placement.split * placement.unit;
}

}  // namespace dtensor
