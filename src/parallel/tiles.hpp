// Cuts a rank's rows into tiles, which are gathered and reduced one by one.
#pragma once

#include <dtensor/parallel/overlap.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/ivalue.h>

#include <vector>

namespace dtensor {

class Tiles;
using TilesPtr = c10::intrusive_ptr<Tiles>;

// The rows of tensors [..., width] on a mesh of which one dimension shards weights. Along that dimension a tensor is sharded by rows or
// whole (like a block's input), or sharded across, by its width (like the values between the block's layers). A tile has some rows of every
// rank: a DTensor [ranks, rows, width].
class Tiles : public torch::CustomClassHolder {
 public:
  // Null if these layers should not, or cannot, be computed in pieces. All ranks get the same answer.
  static TilesPtr of_columns(const at::Tensor& x, const std::vector<LinearLayer>& layers, int64_t pieces);
  static TilesPtr of_rows(const at::Tensor& x, const LinearLayer& layer, const at::Tensor& like, int64_t pieces);
  // Of `rows`, whatever the layers are; `across` is the placement by width along dimension `dim` of the mesh.
  Tiles(const at::Tensor& rows, int64_t dim, const Placement& across, int64_t pieces);

  int64_t pieces() const { return pieces_; }
  bool gathers() const { return ranks_ > 1; }

  // The tiles of a tensor that is sharded by rows, or whole. Tiles are whole: gathered and under way if rows were sharded (gathers()), else
  // views.
  std::vector<at::Tensor> gather(const at::Tensor& tensor) const;
  // reduce() lays out a tile of pending sums as the tensor's rows are, sharded or whole; the result is under way. join() joins these tiles.
  at::Tensor reduce(const at::Tensor& tile) const;
  at::Tensor join(const std::vector<at::Tensor>& tiles) const;

  // across(): this rank's shard [ranks, rows, width] of a tensor sharded across. tile_across(): a tile of it. join_across(): the joined
  // tiles.
  at::Tensor across(const at::Tensor& tensor) const;
  at::Tensor tile_across(const at::Tensor& part, int64_t piece) const;
  at::Tensor join_across(const std::vector<at::Tensor>& tiles) const;

  // The gradient of a layer's parameter, summed over the ranks that have other rows; `placement` is along the dimension that shards
  // weights.
  at::Tensor summed(const at::Tensor& part, const at::Tensor& parameter, const Placement& placement) const;
  // The placement along that dimension, for another dim of the tensor.
  Placement cut(int64_t dim) const { return shard(dim, by_width_[dim_].cut()); }

 private:
  static TilesPtr make(const at::Tensor& rows, const std::vector<LinearLayer>& layers, int64_t weight_dim, int64_t pieces);

  Placements along(const Placement& placement) const;
  at::Tensor tile(const at::Tensor& part, int64_t piece, const Placement& placement, int64_t width) const;
  std::vector<int64_t> with_width(c10::IntArrayRef leading, int64_t width) const;

  DeviceMesh mesh_;
  int64_t dim_;           // of the mesh, that cuts weights
  Placements of_tile_;    // along the others
  Placements by_rows_, by_width_;
  int64_t row_cuts_ = 1;  // ranks along other dimensions, that have other rows
  int64_t ranks_ = 1;     // along dim_, that have other rows
  int64_t before_ = 1, length_ = 1, after_ = 1;  // lengths of a part's dims around the one that dim_ cuts
  std::vector<int64_t> leading_, leading_by_rows_, leading_by_width_;  // lengths of all dims but the last: whole, and of parts
  int64_t pieces_;
};

}  // namespace dtensor
