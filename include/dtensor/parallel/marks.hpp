// Marks in a model's code: how a value lies there, where operators one by one do not see what is best for several of them. Plain tensors
// pass as they are, so a marked model runs on one device too.
#pragma once

#include <dtensor/mesh/placement.hpp>

#include <string_view>

namespace at {
class Tensor;
}

namespace dtensor {

// The input of linear layers that a plan cuts alike (queries, keys and values; gate and up), of which `weight` [out, in] is one's: `x`
// [..., in] whole along the mesh dimensions along which a pinned weight is cut by its outputs. Each layer would gather it so by itself; here
// it is gathered once, and the sum of their gradients is reduced once (f and g of Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al.,
// "Reducing Activation Recomputation", 2022). Communicates an all_gather where `x` is cut along such a dimension, and a reduce_scatter in
// backward; where it is whole, an all_reduce in backward. Differentiable.
at::Tensor prepare_input(const at::Tensor& x, const at::Tensor& weight);

// `x` as `placement` says along the mesh dimension called `mesh_dim`, and as before along others: lay_out(x, "tp", shard(1)) cuts
// positions. On a mesh without such a dimension it is returned as it is, so that one model serves many meshes. Differentiable. Throws when
// `x` cannot lie so.
at::Tensor lay_out(const at::Tensor& x, std::string_view mesh_dim, const Placement& placement);

// `x` as `like` lies: the output of layers cut by rows, whose sum is pending, as their block's input. Its gradient is gathered once for all
// that need it. `like` has the leading dims of `x`, as the numbers of words whose embedding `x` is; `x` is returned as it is where either is
// plain. Differentiable. Throws when `x` cannot lie so.
at::Tensor lay_out_like(const at::Tensor& x, const at::Tensor& like);

}  // namespace dtensor
