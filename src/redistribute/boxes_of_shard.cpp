#include <dtensor/mesh/alias.hpp>
#include <dtensor/redistribute/boxes_of_shard.hpp>

#include <algorithm>

namespace dtensor {

BoxesOfShard::BoxesOfShard(const Layout& layout, c10::IntArrayRef coordinate) : flat_(layout.is_flat()) {
  for (int64_t d = 0; d < layout.ndim(); ++d) held_.push_back(layout.intervals(d, coordinate));
  if (!flat_) return;
  begin_ = layout.flat_shard(coordinate).begin;
  const auto sizes = layout.local_sizes_before(layout.mesh().ndim(), coordinate);
  strides_.resize(sizes.size());
  const auto order = memory_order(layout.strides());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0; step *= std::max<int64_t>(sizes[order[i]], 1)) strides_[order[i]] = step;
}

ShardPiece BoxesOfShard::find(const std::vector<Interval>& box) const {
  ShardPiece piece{{}, {}, 1};
  for (size_t d = 0; d < box.size(); ++d) {
    int64_t before = 0;
    for (const auto& held : held_[d]) {
      if (held.end > box[d].begin) {
        piece.position.push_back(before + box[d].begin - held.begin);
        break;
      }
      before += held.length();
    }
    piece.sizes.push_back(box[d].length());
    piece.numel *= box[d].length();
  }
  return piece;
}

at::Tensor BoxesOfShard::view(const at::Tensor& local, const ShardPiece& piece) const {
  const auto strides = flat_ ? c10::IntArrayRef(strides_) : local.strides();
  int64_t offset = local.storage_offset() - begin_;
  for (size_t d = 0; d < piece.position.size(); ++d) offset += piece.position[d] * strides[d];
  return detail::alias(local, piece.sizes, strides, offset);
}

}  // namespace dtensor
