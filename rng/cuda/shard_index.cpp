#include "rng/cuda/shard_index.hpp"

#include <dtensor/mesh/layout.hpp>

#include <c10/util/accumulate.h>

namespace dtensor::rng::cuda {

std::optional<ShardIndex> shard_index(const Layout& layout, const int64_t* order) {
  ShardIndex index;
  int pieces = 0;
  if (layout.is_flat()) {
    const auto begin = layout.flat_shard(layout.mesh().coordinate()).begin, elements = c10::multiply_integers(layout.sizes());
    const bool alone = c10::multiply_integers(layout.local_sizes_before(layout.mesh().ndim(), layout.mesh().coordinate())) == elements;
    if (!alone) return std::nullopt;
    index.axes = 1;
    index.axis[0] = {c10::multiply_integers(layout.local_sizes()), elements, 0, 1};
    index.piece[0] = {0, begin};
    return index;
  }
  for (int64_t i = 0; i < layout.ndim(); ++i) {
    const int64_t d = order[i], global = layout.sizes()[d], local = layout.local_sizes()[d];
    const auto held = layout.intervals(d, layout.mesh().coordinate());
    if (global == 1 && local == 1) continue;
    if (local == global && index.axes > 0) {  // is one with the axis before it
      auto& outer = index.axis[index.axes - 1];
      outer.local *= local, outer.global *= global;
      for (int p = outer.begin; p < outer.end; ++p) index.piece[p].local *= local, index.piece[p].global *= global;
      continue;
    }
    if (index.axes == ShardIndex::kAxes || pieces + static_cast<int>(held.size()) > ShardIndex::kPieces) return std::nullopt;
    auto& axis = index.axis[index.axes++] = {local, global, pieces, pieces + static_cast<int>(held.size())};
    int64_t begin = 0;
    for (int p = axis.begin; p < axis.end; ++p) {
      const auto& interval = held[p - axis.begin];
      index.piece[p] = {begin, interval.begin};
      begin += interval.length();
    }
    pieces = axis.end;
  }
  return index;
}

}  // namespace dtensor::rng::cuda
