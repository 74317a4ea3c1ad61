// Runs a decision on the local tensors.
#pragma once

#include "src/dispatch/decision.hpp"
#include "src/dispatch/copied_views.hpp"

#include <algorithm>

namespace dtensor::dispatch {

// The tensors of a call. If one occurs twice, the call may need it both as it is and moved.
using Operands = c10::SmallVector<const c10::TensorImpl*, 4>;
inline bool all_distinct(Operands& operands) {
  std::ranges::sort(operands);
  return std::ranges::adjacent_find(operands) == operands.end();
}

// The local tensor of `tensor` in the layout that the move asks for. With `may_keep`, `tensor` keeps the result of a pending reduction
// that the move does, so it is reduced only once.
at::Tensor moved(const OpInfo& info, const at::Tensor& tensor, const Move& move, bool may_keep);

// Whether the tensor that is written may get another layout: it is no parameter, not laid out by the user, and shares no memory.
bool may_cut(const at::Tensor& written);

// Replaces the arguments (stack[begin..]) by the operator's distributed results.
void run_general(const c10::OperatorHandle& op, Stack& stack, size_t begin, const Decision& decision);

// Replaces the local results (stack[begin..]) by distributed ones, finished, or by the operands that the operator returns.
void wrap_results(Stack& stack, size_t begin, const Decision& decision, const std::vector<c10::IValue>& originals);

// Replaces the arguments (stack[begin..], local tensors, some of them on the meta device) by results that have sizes but no values. Views
// share memory as they would with values.
void run_without_values(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack, size_t begin, const Decision& decision);

// Whether an argument, or an element of one, is on the meta device.
bool lacks_values(const Stack& stack, size_t begin);

// Runs a call inside Spmd that has no distributed tensors, as outside of the region.
void run_plain(const c10::OperatorHandle& op, Stack& stack);

// Puts a result into row-major memory order, if its layout reports that. Decisions by the order of memory, such as whether a view is
// possible, are then the same on every rank.
at::Tensor in_reported_order(at::Tensor local, const Layout& layout);

// Copies arguments (stack[begin..], local tensors) that overlap in memory with a written one without being equal to it. Kernels throw for
// some overlaps, and maybe on some ranks only.
void separate_overlapping(const OpInfo& info, Stack& stack, size_t begin);

// Whether two different local tensors lie in one memory.
inline bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         (a.storage_offset() != b.storage_offset() || a.sizes() != b.sizes() || a.strides() != b.strides());
}

// Whether the operator makes tensors from nothing.
bool is_factory(const OpInfo& info);
// Gives a factory call without a device the mesh's device; libtorch's default is the host.
void make_on_mesh(const OpInfo& info, Stack& stack, size_t begin, const DeviceMesh& mesh);
// Whether a factory call asks for another device than the mesh's. (Without a device it makes tensors on the mesh's.)
bool is_made_elsewhere(const OpInfo& info, Stack& stack, size_t begin, const DeviceMesh& mesh);

// Views and casts have what DTensorImpl::inherit passes on; a cast of a group's member is one of what the group was then.
void inherit(const Decision& decision, const DTensorImpl& operand, DTensorImpl& result);

// Runs resize_, set_ and as_strided_ on a tensor whose memory on this rank is as on one device: the operator runs on the local tensor, and
// the tensor takes over its new metadata. Returns false for other tensors.
bool change_metadata(const c10::OperatorHandle& op, Stack& stack, size_t begin);

// Notes a view that is a copy, because its operand was moved or the local memory order allows no view.
void note_copied_view(const Decision& decision, DTensorImpl& base, DTensorImpl& view);

// Gives a view (output `index`) its place in the memory that its base, which may have another dtype, would have on one device.
inline void set_view_offset(const Decision& decision, size_t index, const c10::TensorImpl& base, c10::TensorImpl& view) {
  auto offset = decision.offsets.empty() ? 0 : decision.offsets[index];
  if (!decision.from_memory) {
    const auto bytes = base.storage_offset() * static_cast<int64_t>(base.itemsize());
    offset += bytes / static_cast<int64_t>(view.itemsize());
  }
  if (offset != 0) view.set_storage_offset(offset);
}

// Gives a thin shard, which nothing else shares, the strides that it has in the order of the whole.
void order_if_thin(DTensorImpl& result);

// What few results need: a pending sum the name of its module, a thin shard its order.
void finish_unusual(const Decision& decision, ModuleName module, DTensorImpl& result);

// Gives result `index` what it has beside values and layout: as a view or cast of `base` (the first operand; null: no tensor) its place in
// memory and what it inherits; as a pending sum the name of its module.
inline void finish_result(const Decision& decision, size_t index, c10::TensorImpl* base, ModuleName module, const at::Tensor& result) {
  auto& impl = static_cast<DTensorImpl&>(*result.unsafeGetTensorImpl());
  if ((decision.info->is_view || decision.casts) && base) {
    auto* operand = is_dtensor_impl(base) ? static_cast<DTensorImpl*>(base) : nullptr;
    if (decision.info->is_view) {
      set_view_offset(decision, index, *base, impl);
      if (operand && (decision.lowering || !decision.simple || !decision.moves.empty())) note_copied_view(decision, *operand, impl);
    }
    if (operand) inherit(decision, *operand, impl);
  }
  if (decision.gives_pending || decision.gives_thin) [[unlikely]] finish_unusual(decision, module, impl);
}

}  // namespace dtensor::dispatch
