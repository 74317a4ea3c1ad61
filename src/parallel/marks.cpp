#include <dtensor/parallel/marks.hpp>

#include "src/core/two_meshes.hpp"
#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/error.hpp>
#include <dtensor/tensor.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>

namespace dtensor {

namespace {

Placements placements_of(const DTensorImpl& impl) {
  const auto placements = impl.layout()->placements();
  return {placements.begin(), placements.end()};
}

}  // namespace

at::Tensor prepare_input(const at::Tensor& x, const at::Tensor& weight) {
  const auto* input = as_dtensor(x);
  const auto* cut = as_dtensor(weight);
  if (!input || !cut || !cut->pinned || input->layout()->mesh() != cut->layout()->mesh()) return x;
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
  const auto* impl = as_dtensor(x);
  if (!impl) return x;
  const auto& names = impl->layout()->mesh().names();
  const auto name = std::find(names.begin(), names.end(), mesh_dim);
  if (name == names.end()) return x;
  auto placements = placements_of(*impl);
  auto& now = placements[name - names.begin()];
  if (now == placement) return x;
  now = placement;
  return redistribute(x, placements);
}

at::Tensor lay_out_like(const at::Tensor& x, const at::Tensor& like) {
  const auto* impl = as_dtensor(x);
  const auto* other = as_dtensor(like);
  if (!impl || !other || impl->layout()->placements() == other->layout()->placements()) return x;
  if (impl->layout()->mesh() != other->layout()->mesh()) {
    fail("lay_out_like", "the tensors are on two meshes; got {} and {}; {}", impl->layout()->str(), other->layout()->str(),
         why_two(impl->layout()->mesh(), other->layout()->mesh()));
  }
  return redistribute(x, other->layout()->placements());
}

}  // namespace dtensor
