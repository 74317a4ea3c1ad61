// Wraps the results of a local call: local tensors -> distributed tensors.
#include "src/dispatch/execute.hpp"

#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

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

c10::IValue distributed(const Decision& decision, const c10::IValue& value, size_t& index) {
  if (value.isTensor()) {
    const auto& local = value.toTensor();
    const auto i = index++;
    if (!local.defined()) return local;
    auto layout = output_layout(decision, i, local);
    auto part = decision.reorders() ? in_reported_order(local, *layout) : local;
    return wrap(std::move(part), std::move(layout));
  }
  return with_tensors(value, [&](const at::Tensor& local) { return wrap(local, output_layout(decision, index++, local)); });
}

void note_copied_views(const Decision& decision, const c10::IValue& base, const c10::IValue& value, size_t first) {
  if (!base.isTensor()) return;
  for (const auto& [view, argument, element] : tensors_in(value)) {
    set_view_offset(decision, first++, offset_in_bytes(*base.unsafeToTensorImpl()) / static_cast<int64_t>(view.dtype().itemsize()), view);
    note_copied_view(decision, base, view);
  }
}

}  // namespace

void wrap_results(Stack& stack, size_t begin, const Decision& decision, const std::vector<c10::IValue>& originals) {
  const auto& info = *decision.info;
  size_t index = 0;
  for (size_t r = 0; begin + r < stack.size(); ++r) {
    auto& value = stack[begin + r];
    const int source = r < info.returns_argument.size() ? info.returns_argument[r] : -1;
    if (source >= 0) {
      value = originals[source];
    } else {
      const size_t first = index;
      value = distributed(decision, value, index);
      if (info.is_view) note_copied_views(decision, originals[0], value, first);
    }
  }
}

at::Tensor in_reported_order(at::Tensor local, const Layout& layout) {
  if (dtensor::detail::in_row_major_order(local) || !dtensor::detail::in_row_major_order(layout)) return local;
  LocalMode below;
  return local.clone(at::MemoryFormat::Contiguous);
}

void inherit(const Decision& decision, const c10::IValue& operand, const c10::IValue& results) {
  const auto* impl = operand.isTensor() ? as_dtensor(operand.toTensor()) : nullptr;
  if (!impl || (!impl->member() && !impl->pinned && !impl->laid_out && !impl->module && !c10::InferenceMode::is_enabled())) [[likely]]
    return;
  const auto& member = impl->member();
  if (decision.casts) {
    auto& cast = *as_dtensor(results.toTensor());
    cast.pinned = impl->pinned;
    cast.module = impl->module;
    if (!member || !impl->layout()->is_flat() || !cast.layout()->is_flat()) return;
    const auto made = member->generation < 0 ? member->group->generation() : member->generation;
    cast.set_member(c10::make_intrusive<FlatMember>(member->group, member->index, made));
  } else if (results.isTensor()) {
    as_dtensor(results.toTensor())->inherit(*impl);
  } else if (results.isTensorList()) {
    for (const auto& element : results.toListRef()) as_dtensor(element.toTensor())->inherit(*impl);
  }
}

void note_copied_view(const Decision& decision, const c10::IValue& base, const at::Tensor& view) {
  auto* source = base.isTensor() ? as_dtensor(base.toTensor()) : nullptr;
  auto* result = as_dtensor(view);
  if (!source || !result) return;
  if (result->local().is_alias_of(source->local())) {
    const bool moved = !decision.moves.empty() && source->layout() != decision.moves[0].to;
    if (!moved) return;
    LocalMode local;  // the chunk of a whole tensor is one of its views, but a write to it would not reach the other ranks by itself
    result->set_local(result->local().clone(), result->layout());
  }
  const auto& name = decision.info->schema->name();
  join_copies(*source, *result, decision.outputs_known, {name == "aten::_conj", name == "aten::_neg_view"});
}

}  // namespace dtensor::dispatch
