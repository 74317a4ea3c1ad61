// R -> S(d): every rank keeps its shard. Nothing is communicated. The shard is a view of the whole, unless a split makes it of several
// pieces.
#include "src/redistribute/transition.hpp"

#include <dtensor/mesh/alias.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

namespace dtensor::redistribute {

namespace {

// Where a split makes shards of several pieces, every rank copies its own, into the memory order of the whole: a rank whose pieces happen
// to lie like one view would keep another order than the others, and so decide otherwise on the views of the tensor.
at::Tensor chunk_of_pieces(const at::Tensor& local, const Placement& p, int64_t parts, int64_t index) {
  const int64_t dim = p.dim, length = local.size(dim);
  const auto held = cut(length, p, parts, index);
  const int64_t each = cut_length(length, p, parts, index) / p.split;
  Sizes sizes(local.sizes());
  sizes[dim] = std::max<int64_t>(p.split * each, 1);  // views of an empty shard are decided on as if its length were one
  const auto strides = at::infer_dense_strides(sizes, local.strides());
  sizes[dim] = p.split * each;
  auto shard = at::empty_strided(sizes, strides, local.options());
  if (shard.numel() == 0) return shard;
  const auto in_blocks = [&](const at::Tensor& tensor) {
    auto blocks = tensor.sizes().vec();
    blocks[dim] /= p.split;
    blocks.insert(blocks.begin() + dim, p.split);
    return tensor.view(blocks);
  };
  in_blocks(shard).copy_(in_blocks(local).narrow(dim + 1, held[0].begin, each));
  return shard;
}

}  // namespace

comm::Async chunk(const at::Tensor& local, const Step& step) {
  const auto& p = step.to;
  const int64_t i = step.mesh_dims.front();
  const auto& mesh = step.after->mesh();
  if (p.split > 1) return {chunk_of_pieces(local, p, mesh.sizes()[i], mesh.coordinate(i)), {}};
  const auto held = cut(local.size(p.dim), p, mesh.sizes()[i], mesh.coordinate(i));
  if (held.empty()) return {detail::narrow(local, p.dim, 0, 0), {}};
  return {detail::narrow(local, p.dim, held[0].begin, held[0].length()), {}};
}

}  // namespace dtensor::redistribute
