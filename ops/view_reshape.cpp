#include "ops/view_reshape.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace dtensor::rules {

namespace {

int64_t product(c10::IntArrayRef sizes) {
  int64_t result = 1;
  for (const auto size : sizes) result *= size;
  return result;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A cut of a row-major sequence: `blocks` blocks of `length` elements, each cut in chunks of `chunk` or, in the proportion of shares, in
// pieces of `chunk`.
struct Sequence {
  int64_t blocks, length, chunk;
};

Sequence cut_of(c10::IntArrayRef sizes, const Placement& p, int64_t parts) {
  const int64_t inner = product(sizes.slice(p.dim + 1));
  const int64_t units = sizes[p.dim] / (p.split * p.unit);
  const int64_t together = p.shares ? 1 : ceil_div(units, parts);
  return {product(sizes.slice(0, p.dim)) * p.split, sizes[p.dim] / p.split * inner, together * p.unit * inner};
}

// The same cut, of dim `dim` of `sizes`: `length` and `chunk` in that dim's indices, `blocks` within it.
std::optional<Sequence> within(const Sequence& cut, c10::IntArrayRef sizes, int64_t dim) {
  const int64_t outer = product(sizes.slice(0, dim)), inner = product(sizes.slice(dim + 1));
  if (cut.blocks % outer != 0 || cut.length % inner != 0 || cut.chunk % inner != 0) return {};
  return Sequence{cut.blocks / outer, cut.length / inner, cut.chunk / inner};
}

// The smallest unit with which chunking each of `cuts` over `parts` gives its chunk; 0 if there is none.
int64_t unit_of(const std::vector<Sequence>& cuts, int64_t parts) {
  int64_t common = 0;
  for (const auto& cut : cuts) common = std::gcd(common, std::gcd(cut.length, cut.chunk));
  auto fits = [&](int64_t unit) {
    return std::ranges::all_of(cuts,
                       [&](const Sequence& cut) { return ceil_div(cut.length / unit, parts) * unit == cut.chunk; });
  };
  int64_t best = 0;
  for (int64_t unit = 1; unit * unit <= common; ++unit) {
    if (common % unit != 0) continue;
    if (fits(unit)) return unit;
    if (fits(common / unit)) best = common / unit;  // descends as `unit` grows
  }
  return best;
}

// The unit with which the proportion of as many pieces is the same; 0 if there is none.
int64_t unit_of_pieces(const std::vector<Sequence>& cuts) {
  const bool alike = std::ranges::all_of(cuts, [&](const Sequence& cut) { return cut.chunk == cuts[0].chunk; });
  return alike ? cuts[0].chunk : 0;
}

std::optional<Placement> name_cut(const std::vector<Reshape::Pair>& pairs, const Placement& p, int64_t parts, int64_t dim) {
  std::vector<Sequence> cuts;
  for (const auto& pair : pairs) {
    const auto cut = within(cut_of(pair.from, p, parts), pair.to, dim);
    if (!cut || (!cuts.empty() && cut->blocks != cuts[0].blocks)) return {};
    cuts.push_back(*cut);
  }
  const int64_t unit = p.shares ? unit_of_pieces(cuts) : unit_of(cuts, parts);
  if (unit == 0 || cuts[0].blocks > std::numeric_limits<int32_t>::max()) return {};
  return shard(dim, Cut{static_cast<int32_t>(cuts[0].blocks), unit, p.shares});
}

// The simplest placement of `to` that is the cut `p` of `from`.
std::optional<Placement> carry(const std::vector<Reshape::Pair>& pairs, const Placement& p, int64_t parts) {
  if (pairs.empty()) return {};
  std::optional<Placement> best;
  for (int64_t dim = 0; dim < static_cast<int64_t>(pairs[0].to.size()); ++dim) {
    const auto next = name_cut(pairs, p, parts, dim);
    if (next && (!best || next->split * next->unit < best->split * best->unit)) best = next;
  }
  return best;
}

void cut_dim(Sizes& sizes, const Placement& p, int64_t parts, int64_t index) {
  if (p.is_shard()) sizes[p.dim] = cut_length(sizes[p.dim], p, parts, index);
}

}  // namespace

Reshape::Reshape(c10::IntArrayRef in, c10::IntArrayRef out) {
  if (product(in) > 0) local_.push_back({Sizes(in.begin(), in.end()), Sizes(out.begin(), out.end())});
}

std::optional<Placement> Reshape::forward(const Placement& in, int64_t parts) const { return carry(local_, in, parts); }

std::optional<Placement> Reshape::backward(const Placement& out, int64_t parts) const {
  std::vector<Pair> swapped;
  for (const auto& pair : local_) {
    if (pair.to[out.dim] % (out.split * out.unit) != 0) return {};
    swapped.push_back({pair.to, pair.from});
  }
  return carry(swapped, out, parts);
}

void Reshape::apply(const Placement& in, const Placement& out, int64_t parts) {
  if (!in.is_shard()) return;
  std::vector<Pair> next;
  for (const auto& pair : local_) {
    // Chunking leaves full parts, perhaps one shorter part, and empty ones: two ranks show both kinds that hold anything. Shares leave any.
    const auto cut = cut_of(pair.from, in, parts);
    for (int64_t index = 0; index < parts; index += in.shares ? 1 : std::max<int64_t>(cut.length / cut.chunk, 1)) {
      auto part = pair;
      cut_dim(part.from, in, parts, index);
      cut_dim(part.to, out, parts, index);
      if (product(part.from) > 0 && std::ranges::find(next, part) == next.end()) next.push_back(std::move(part));
    }
  }
  local_ = std::move(next);
}

}  // namespace dtensor::rules
