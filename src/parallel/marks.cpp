#include <dtensor/parallel/marks.hpp>

#include <dtensor/mesh/two_meshes.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>

namespace dtensor {

namespace {

Placements placements_of(const Layout& layout) { return {layout.placements().begin(), layout.placements().end()}; }

}  // namespace

at::Tensor prepare_input(const at::Tensor& x, const at::Tensor& weight) {
  const auto *input = find_layout(x), *cut = find_layout(weight);
  if (!input || !cut || !is_pinned(weight) || input->mesh() != cut->mesh()) return x;
  const auto before = placements_of(*input), of_weight = placements_of(*cut);
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

at::Tensor lay_out(const at::Tensor& x, std::string_view mesh_dim, const Placement& placement) {
  const auto* layout = find_layout(x);
  if (!layout) return x;
  const auto& names = layout->mesh().names();
  const auto name = std::ranges::find(names, mesh_dim);
  if (name == names.end()) return x;
  auto placements = placements_of(*layout);
  auto& now = placements[name - names.begin()];
  if (now == placement) return x;
  now = placement;
  return redistribute(x, placements);
}

at::Tensor lay_out_like(const at::Tensor& x, const at::Tensor& like) {
  const auto *layout = find_layout(x), *other = find_layout(like);
  if (!layout || !other || layout->placements() == other->placements()) return x;
  if (layout->mesh() != other->mesh()) {
    fail("lay_out_like", "the tensors are on two meshes; got {} and {}; {}", layout->str(), other->str(),
         why_two(layout->mesh(), other->mesh()));
  }
  return redistribute(x, other->placements());
}

}  // namespace dtensor
