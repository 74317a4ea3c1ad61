// Wraps the results of a local call: local tensors -> distributed tensors.
#include "src/dispatch/execute.hpp"

#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/operator_event.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

#include <ATen/ExpandUtils.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace dtensor::dispatch {

namespace {

// A layout with what a local result tells of the dims that are not cut.
LayoutPtr as_found(const Layout& known, const at::Tensor& local) {
  Sizes sizes(local.sizes().begin(), local.sizes().end());
  for (const auto& placement : known.placements()) {
    if (placement.is_shard()) sizes[placement.dim] = known.sizes()[placement.dim];
  }
  return Layout::get(known.mesh(), known.placements(), sizes, local.scalar_type());
}

LayoutPtr output_layout(const Decision& decision, size_t index, const at::Tensor& local) {
  if (!decision.outputs_known) {
    const Placements replicated(decision.mesh.ndim(), replicate());
    return Layout::get(decision.mesh, replicated, local.sizes(), local.strides(), local.scalar_type());
  }
  const auto& like = decision.outputs.at(index);
  auto layout = like ? like->layout() : LayoutPtr();
  if (layout && std::ranges::count(decision.open, index) > 0) layout = as_found(*layout, local);
  if (!layout || layout->local_sizes() != local.sizes()) {
    fail(decision.info->name,
         "the sharding rule and the local operator disagree; got local sizes [{}]; expected {}; this is a bug in the rule",
         fmt::join(local.sizes(), ", "), layout ? layout->str() : "no tensor");
  }
  if (layout->dtype() == local.scalar_type()) return layout;
  return Layout::get(decision.mesh, layout->placements(), layout->sizes(), layout->strides(), local.scalar_type());
}

}  // namespace

void wrap_results(Stack& stack, size_t begin, const Decision& decision, const std::vector<c10::IValue>& originals) {
  const auto& info = *decision.info;
  auto* base = !originals.empty() && originals[0].isTensor() ? originals[0].toTensor().unsafeGetTensorImpl() : nullptr;
  const auto module = decision.gives_pending ? module_of_arguments(originals) : nullptr;
  size_t index = 0;
  const auto distributed = [&](const at::Tensor& local) {
    const auto i = index++;
    if (!local.defined()) return local;
    auto layout = output_layout(decision, i, local);
    auto shard = decision.reorders() ? in_reported_order(local, *layout) : local;
    auto result = wrap(std::move(shard), std::move(layout));
    finish_result(decision, i, base, module, result);
    return result;
  };
  for (size_t r = 0; begin + r < stack.size(); ++r) {
    auto& value = stack[begin + r];
    const int source = r < info.returns_argument.size() ? info.returns_argument[r] : -1;
    value = source >= 0 ? originals[source] : with_tensors(value, [&](const at::Tensor& local, int) { return distributed(local); });
  }
}

at::Tensor in_reported_order(at::Tensor local, const Layout& layout) {
  if (dtensor::detail::in_row_major_order(local) || !dtensor::detail::in_row_major_order(layout)) return local;
  LocalMode below;
  return local.clone(at::MemoryFormat::Contiguous);
}

bool is_thin(const Layout& layout) {
  if (layout.is_flat()) return false;
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    if (layout.local_sizes()[d] <= 1 && layout.sizes()[d] > 1) return true;
  }
  return false;
}

// Where a shard has no element, or one along some dim, kernels leave any strides, and what later decides on views reads them. So such a
// shard gets the strides that it has in the order of the whole, as the shards of other ranks do. Nothing is copied.
void order_if_thin(DTensorImpl& result) {
  if (!is_thin(*result.layout())) return;
  const auto& local = result.local();
  Sizes filled(local.sizes());
  std::ranges::replace(filled, 0, 1);
  const auto strides = at::infer_dense_strides(filled, result.layout()->strides());
  if (local.strides() == c10::IntArrayRef(strides)) return;
  for (int64_t d = 0; d < local.dim() && local.numel() > 0; ++d) {
    if (local.sizes()[d] > 1 && local.strides()[d] != strides[d]) return;
  }
  result.set_local(dtensor::detail::alias(local, local.sizes(), strides, local.storage_offset()), result.layout());
}

void finish_unusual(const Decision& decision, ModuleName module, DTensorImpl& result) {
  if (decision.gives_pending) result.module = module;
  if (decision.gives_thin) order_if_thin(result);
}

void inherit(const Decision& decision, const DTensorImpl& operand, DTensorImpl& result) {
  const auto& member = operand.member();
  if (!member && !operand.pinned && !operand.laid_out && !operand.module && !c10::InferenceMode::is_enabled()) [[likely]]
    return;
  if (!decision.casts) return result.inherit(operand);
  result.pinned = operand.pinned;
  result.module = operand.module;
  if (!member || !operand.layout()->is_flat() || !result.layout()->is_flat()) return;
  const auto made = member->generation < 0 ? member->group->generation() : member->generation;
  result.set_member(c10::make_intrusive<FlatMember>(member->group, member->index, made));
}

void note_copied_view(const Decision& decision, DTensorImpl& base, DTensorImpl& view) {
  if (view.local().is_alias_of(base.local())) {
    const bool moved = !decision.moves.empty() && base.layout() != decision.moves[0].to;
    if (!moved) return;
    LocalMode local;  // the chunk of a whole tensor is one of its views, but a write to it would not reach the other ranks by itself
    view.set_local(view.local().clone(), view.layout());
  }
  const auto& name = decision.info->schema->name();
  join_copies(base, view, decision.outputs_known, {name == "aten::_conj", name == "aten::_neg_view"});
}

}  // namespace dtensor::dispatch
