// Where boxes of global elements lie in a rank's local shard.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// Where a box lies in a local shard: the first element's position, as seen before a flat cut, and the lengths.
struct ShardPiece {
  Sizes position, sizes;
  int64_t numel = 0;
};

// The local shard of the rank at a coordinate.
class BoxesOfShard {
 public:
  BoxesOfShard(const Layout& layout, c10::IntArrayRef coordinate);

  // `box`: one interval per dim, within one of layout.boxes(coordinate).
  ShardPiece find(const std::vector<Interval>& box) const;

  // The piece's elements, in the memory of `local`, which is dense where the layout is flat. Tracks no gradient.
  at::Tensor view(const at::Tensor& local, const ShardPiece& piece) const;

 private:
  bool flat_;
  std::vector<Intervals> held_;
  Sizes strides_;
  int64_t begin_ = 0;
};

}  // namespace dtensor

#pragma GCC visibility pop
