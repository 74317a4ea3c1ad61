// Placements: how they print, and which part of a dimension a shard is.
#include <dtensor/mesh/placement.hpp>

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>
#include <range/v3/numeric/partial_sum.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <ostream>

namespace dtensor {

namespace {

// The range of the middle part of (split, middle, unit) that is part `index`: in the proportion of shares, or as torch.chunk cuts it.
Interval chunk(int64_t middle, const Shares* shares, int64_t parts, int64_t index) {
  if (shares) return {index == 0 ? 0 : shares->end(index - 1, middle), shares->end(index, middle)};
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

std::string Placement::str() const {
  if (is_replicate()) return "R";
  if (is_partial()) return fmt::format("P({})", name(op));
  if (is_flat()) return offset == 0 ? fmt::format("Flat({})", unit) : fmt::format("Flat({}, at {})", unit, offset);
  std::string text = fmt::format("S({}", dim);
  if (shares) text = fmt::format("Ragged({}, {}", dim, shares->str());
  if (split != 1) text += fmt::format(", split={}", split);
  if (unit != 1) text += fmt::format(", unit={}", unit);
  return text + ")";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << placement.str(); }

std::ostream& operator<<(std::ostream& out, const Interval& interval) {
  return out << '[' << interval.begin << ", " << interval.end << ')';
}

Placements without_partial(PlacementsRef placements) {
  Placements reduced(placements.begin(), placements.end());
  for (auto& placement : reduced) {
    if (placement.is_partial()) placement = replicate();
  }
  return reduced;
}

std::string str(PlacementsRef placements) {
  std::string text;
  for (const auto& placement : placements) text += (text.empty() ? "" : ", ") + placement.str();
  return "(" + text + ")";
}

Intervals cut(int64_t length, const Placement& placement, int64_t parts, int64_t index) {
  const int64_t middle = middle_length(length, placement);
  const auto part = chunk(middle, placement.shares, parts, index);
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
  return chunk(middle_length(length, placement), placement.shares, parts, index).length() * placement.split * placement.unit;
}

int64_t longest_cut(int64_t length, const Placement& placement, int64_t parts) {
  if (!placement.shares) return cut_length(length, placement, parts, 0);
  int64_t longest = 0;
  for (int64_t i = 0; i < parts; ++i) longest = std::max(longest, cut_length(length, placement, parts, i));
  return longest;
}

Interval flat_shard(int64_t numel, const Placement& placement, int64_t index) {
  const auto bound = [&](int64_t piece) { return std::clamp<int64_t>(piece * placement.unit - placement.offset, 0, numel); };
  return {bound(index), bound(index + 1)};
}

// -- Shares --------------------------------------------------------------------------------------------------------------------

Shares::Shares(std::vector<int64_t> parts) : parts_(std::move(parts)) {
  ranges::partial_sum(parts_, std::back_inserter(ends_));
}

const Shares* Shares::of(c10::ArrayRef<int64_t> parts) {
  int64_t divisor = 0, sum = 0;
  for (const auto part : parts) {
    const bool good = part >= 0 && part <= (int64_t{1} << 62) - sum;
    if (!good) fail("RaggedShard", "got the shares {}; expected numbers of 0 or more, with a sum of at most 2^62", parts.vec());
    divisor = std::gcd(divisor, part);
    sum += part;
  }
  if (sum == 0) fail("RaggedShard", "got the shares {}; expected one per rank of the mesh dimension, not all of them 0", parts.vec());
  auto reduced = parts.vec();
  for (auto& part : reduced) part /= divisor;

  static auto* mutex = new std::mutex;  // these outlive every thread
  static auto* known = new std::map<std::vector<int64_t>, std::unique_ptr<const Shares>>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto& shares = (*known)[reduced];
  if (!shares) shares.reset(new Shares(reduced));
  return shares.get();
}

int64_t Shares::end(int64_t index, int64_t length) const {
  return static_cast<int64_t>(static_cast<__int128>(length) * ends_[index] / ends_.back());
}

std::string Shares::str() const {
  constexpr size_t kShown = 16;
  const auto shown = c10::ArrayRef<int64_t>(parts_).slice(0, std::min(parts_.size(), kShown));
  return fmt::format("{}{}", fmt::join(shown, ":"), parts_.size() > kShown ? fmt::format(":... of {}", parts_.size()) : "");
}

bool Cut::operator<(const Cut& other) const {
  if (split != other.split) return split < other.split;
  if (unit != other.unit) return unit < other.unit;
  if (shares == other.shares) return false;
  return !shares || (other.shares && shares->parts().vec() < other.shares->parts().vec());
}

}  // namespace dtensor
