// Placements: how a tensor is distributed over one dimension of a mesh.
#pragma once

#include <dtensor/base/reduce_op.hpp>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <iosfwd>
#include <limits>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

enum class PlacementKind : uint8_t { replicate, shard, partial, flat };

// A proportion: rank i gets parts[i] / (sum of parts). Interned, so that equal ones (2:4 is 1:2) are one object; never freed.
class Shares {
 public:
  // Throws for none, negative numbers, and a sum that is 0 or above 2^62.
  static const Shares* of(c10::ArrayRef<int64_t> parts);

  c10::ArrayRef<int64_t> parts() const { return parts_; }
  bool are_equal() const { return std::ranges::all_of(parts_, [&](int64_t part) { return part == parts_.front(); }); }

  // The block at which the share `index` of `length` blocks ends and the next begins, rounded down.
  int64_t end(int64_t index, int64_t length) const;

  std::string str() const;  // "3:0:1"

 private:
  explicit Shares(std::vector<int64_t> parts);
  std::vector<int64_t> parts_, ends_;
};

// How a dim of n indices is sharded. The dim is seen as (split, n/(split*unit), unit), and the middle of the three is chunked or, with
// shares, cut in their proportion.
struct Cut {
  int32_t split = 1;
  int64_t unit = 1;
  const Shares* shares = nullptr;

  bool operator==(const Cut&) const = default;
  bool operator<(const Cut& other) const;  // the same on every rank

  int64_t block() const { return split * unit; }  // which divides n
  Cut with_unit(int64_t other) const { return {split, other, shares}; }
};

// One value type for all placements, so that a layout is a flat, hashable list.
//
//   Replicate            every rank has the whole tensor
//   Shard(d)             dim d is cut as torch.chunk does: ceil(n/size) each, the last ones smaller or empty
//   StridedShard(d, k)   dim d is seen as (k, n/k) and its inner part is cut (a fused QKV has k = 3)
//   RaggedShard(d, 3:0:1) dim d is cut in this proportion: of 8 indices the first rank has 6, the second none, the third 2
//   Partial(op)          the value is `op` over the ranks' local tensors
//   Flat(n, offset)      the elements, in memory order, lie at `offset` of a buffer cut in pieces of n: rank i has those in [i n, (i + 1)
//   n)
//
// A Flat placement applies last: it cuts what the placements of all other mesh dimensions leave. Its local tensors are rows,
// [1, ..., 1, elements].
//
// `unit` is for views: flattening [b, s] with b sharded gives a dim of b*s elements that is cut between blocks of s. It also keeps
// blocks whole that belong together (rows of a tile).
struct Placement {
  PlacementKind kind = PlacementKind::replicate;
  ReduceOp op = ReduceOp::sum;
  int16_t dim = 0;
  int32_t split = 1;
  int64_t unit = 1;
  const Shares* shares = nullptr;
  int64_t offset = 0;  // of a flat placement, whose pieces have `unit` elements

  Cut cut() const { return {split, unit, shares}; }

  bool is_replicate() const { return kind == PlacementKind::replicate; }
  bool is_shard() const { return kind == PlacementKind::shard; }
  bool is_shard(int64_t d) const { return is_shard() && dim == d; }
  bool is_partial() const { return kind == PlacementKind::partial; }
  bool is_flat() const { return kind == PlacementKind::flat; }
  bool cuts() const { return is_shard() || is_flat(); }  // every element is one rank's
  bool is_partial(ReduceOp o) const { return is_partial() && op == o; }

  bool operator==(const Placement&) const = default;

  // "R", "S(0)", "S(0, split=3)", "S(0, unit=4)", "Ragged(0, 3:0:1)", "P(sum)", "Flat(4096, at 512)"
  std::string str() const;
};

std::ostream& operator<<(std::ostream& out, const Placement& placement);

namespace detail {
// The nearest number that T can hold. A dim that is out of range stays out of range, and is an error once the tensor is known.
template <class T>
T saturate(int64_t value) {
  return static_cast<T>(std::clamp<int64_t>(value, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
}
}  // namespace detail

inline Placement replicate() { return {}; }
inline Placement shard(int64_t dim) { return {PlacementKind::shard, ReduceOp::sum, detail::saturate<int16_t>(dim)}; }
inline Placement strided_shard(int64_t dim, int64_t split, int64_t unit = 1) {
  return {PlacementKind::shard, ReduceOp::sum, detail::saturate<int16_t>(dim), detail::saturate<int32_t>(split), unit};
}
inline Placement shard(int64_t dim, const Cut& cut) {
  return {PlacementKind::shard, ReduceOp::sum, detail::saturate<int16_t>(dim), cut.split, cut.unit, cut.shares};
}
// Dim `dim` is cut between blocks of `unit` indices in the proportion `shares`, one share per rank; the ends are rounded down. A share
// may be 0. Throws as Shares::of() does.
inline Placement ragged_shard(int64_t dim, c10::ArrayRef<int64_t> shares, int64_t unit = 1) {
  return shard(dim, Cut{1, unit, Shares::of(shares)});
}
inline Placement partial(ReduceOp op = ReduceOp::sum) { return {PlacementKind::partial, op}; }
// Each rank holds `piece` elements of the buffer. Only one mesh dimension of a layout may be flat, and only dense tensors with dims.
inline Placement flat(int64_t piece, int64_t offset = 0) { return {PlacementKind::flat, ReduceOp::sum, 0, 1, piece, nullptr, offset}; }

// PyTorch's spelling of the same constructors.
inline Placement Replicate() { return replicate(); }
inline Placement Shard(int64_t dim) { return shard(dim); }
inline Placement StridedShard(int64_t dim, int64_t split) { return strided_shard(dim, split); }
inline Placement RaggedShard(int64_t dim, c10::ArrayRef<int64_t> shares, int64_t unit = 1) { return ragged_shard(dim, shares, unit); }
inline Placement Partial(ReduceOp op = ReduceOp::sum) { return partial(op); }
inline Placement Flat(int64_t piece, int64_t offset = 0) { return flat(piece, offset); }

// One placement per mesh dimension. They apply left to right: each cuts the shard that the one before left.
using Placements = c10::SmallVector<Placement, 4>;
using PlacementsRef = c10::ArrayRef<Placement>;

// "(S(0), R)"
std::string str(PlacementsRef placements);

// The same placements with Replicate in place of Partial: for gradients and for files.
Placements without_partial(PlacementsRef placements);
inline std::string str(const Placements& placements) { return str(PlacementsRef(placements)); }

// A half-open range [begin, end) of indices.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t length() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Interval& interval);
using Intervals = c10::SmallVector<Interval, 4>;

// The intervals of [0, length) that rank `index` of `parts` holds under the Shard `placement`: in order, none empty, adjacent
// ones joined. Throws if split*unit does not divide length.
Intervals cut(int64_t length, const Placement& placement, int64_t parts, int64_t index);

// The number of indices in cut(...), and in the longest shard of all ranks.
int64_t cut_length(int64_t length, const Placement& placement, int64_t parts, int64_t index);
int64_t longest_cut(int64_t length, const Placement& placement, int64_t parts);

// The elements that rank `index` holds of a tensor of `numel` elements under a flat `placement`.
Interval flat_shard(int64_t numel, const Placement& placement, int64_t index);

}  // namespace dtensor

#pragma GCC visibility pop
