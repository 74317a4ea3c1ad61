// Marks in a model's code state the layout of an activation. An operator decides for itself only; a mark decides for several operators at
// once. Plain tensors pass through unchanged, so a marked model runs on one device too.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/placement.hpp>
#include <dtensor/mesh/two_meshes.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <string_view>

#pragma GCC visibility push(default)

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

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline Placements placements_of(const Layout& layout) { return {layout.placements().begin(), layout.placements().end()}; }

}  // namespace detail

inline at::Tensor prepare_input(const at::Tensor& x, const at::Tensor& weight) {
  const auto *input = find_layout(x), *cut = find_layout(weight);
  if (!input || !cut || !is_pinned(weight) || input->mesh() != cut->mesh()) return x;
  const auto before = detail::placements_of(*input), of_weight = detail::placements_of(*cut);
  auto whole = before;
  bool by_outputs = false;
  for (size_t m = 0; m < whole.size(); ++m) {
    if (!of_weight[m].is_shard(0)) continue;
    by_outputs = true;
    whole[m] = replicate();
  }
  if (whole != before) return redistribute(x, whole);
  if (!by_outputs || !x.requires_grad() || !c10::GradMode::is_enabled()) return x;
  const auto as_input = without_partial(before);
  const auto same = x.view_as(x);
  same.register_hook([as_input](const at::Tensor& gradient) { return redistribute(gradient, as_input); });
  return same;
}

inline at::Tensor lay_out(const at::Tensor& x, std::string_view mesh_dim, const Placement& placement) {
  const auto* layout = find_layout(x);
  if (!layout) return x;
  const auto& names = layout->mesh().names();
  const auto name = std::ranges::find(names, mesh_dim);
  if (name == names.end()) return x;
  auto placements = detail::placements_of(*layout);
  auto& now = placements[name - names.begin()];
  if (now == placement) return x;
  now = placement;
  return redistribute(x, placements);
}

inline at::Tensor lay_out_like(const at::Tensor& x, const at::Tensor& like) {
  const auto *layout = find_layout(x), *other = find_layout(like);
  if (!layout || !other || layout->placements() == other->placements()) return x;
  if (layout->mesh() != other->mesh()) {
    fail("lay_out_like", "the tensors are on two meshes; got {} and {}; {}", layout->str(), other->str(),
         why_two(layout->mesh(), other->mesh()));
  }
  return redistribute(x, other->placements());
}

}  // namespace dtensor

#pragma GCC visibility pop
