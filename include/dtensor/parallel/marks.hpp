// Marks in a model's code state the layout of an activation. An operator decides for itself only; a mark decides for several operators at
// once. Plain tensors pass through unchanged, so a marked model runs on one device too.
#pragma once

#include <dtensor/mesh/placement.hpp>

#include <string_view>

namespace at {
class Tensor;
}

namespace dtensor {

// Prepares the input `x` [..., in] of several linear layers that a plan shards alike (queries, keys and values; gate and up). `weight`
// [out, in] is the weight of one of them. The result is `x`, whole along the mesh dimensions along which a pinned weight is sharded by its
// outputs. Without this mark each layer gathers `x` by itself; with it `x` is gathered once, and the sum of the layers' gradients is
// reduced once (f and g of Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation", 2022).
// Communicates an all_gather, and a reduce_scatter in backward, if `x` is sharded along such a dimension; an all_reduce in backward if it
// is whole. Differentiable.
at::Tensor prepare_input(const at::Tensor& x, const at::Tensor& weight);

// Gives `x` the placement `placement` along the mesh dimension named `mesh_dim`; the other placements stay. lay_out(x, "tp", shard(1))
// shards positions. On a mesh without that dimension `x` is returned unchanged, so one model serves many meshes. Differentiable. Throws if
// `x` cannot have this placement.
at::Tensor lay_out(const at::Tensor& x, std::string_view mesh_dim, const Placement& placement);

// Gives `x` the placements of `like`. Use it to lay out the output of row-sharded layers, which is a pending sum, as the input of their
// block; its gradient is then gathered once for all that need it. `like` has the leading dims of `x`; it may be the token ids whose
// embedding is `x`. If either is plain, `x` is returned unchanged. Differentiable. Throws if `x` cannot have these placements.
at::Tensor lay_out_like(const at::Tensor& x, const at::Tensor& like);

}  // namespace dtensor
