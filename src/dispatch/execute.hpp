// Running a decision on the local parts.
#pragma once

#include "src/dispatch/decision.hpp"
#include "src/dispatch/parted.hpp"

#include <algorithm>

namespace dtensor::dispatch {

// The tensors of a call. A tensor that occurs twice may be wanted both as it is and moved.
using Operands = c10::SmallVector<const c10::TensorImpl*, 4>;
inline bool all_distinct(Operands& operands) {
  std::sort(operands.begin(), operands.end());
  return std::adjacent_find(operands.begin(), operands.end()) == operands.end();
}

// The part of `tensor` under the layout that the move asks for. `may_settle`: a pending reduction that this does stays done in
// `tensor`, so that it is done once.
at::Tensor moved(const OpInfo& info, const at::Tensor& tensor, const Move& move, bool may_settle);

// Whether what is written may be laid out anew: no parameter, not laid out by the user, memory that nobody else has.
bool may_cut(const at::Tensor& written);

// Replaces the arguments (stack[begin..]) by the operator's distributed results.
void run_general(const c10::OperatorHandle& op, Stack& stack, size_t begin, const Decision& decision);

// Replaces the local results (stack[begin..]) by distributed ones, or by the operands that the operator returns.
void wrap_results(Stack& stack, size_t begin, const Decision& decision, const std::vector<c10::IValue>& originals);

// Replaces the arguments (stack[begin..], local parts, some of them on the meta device) by results of which there are sizes only. Views
// share the memory that there would be.
void run_without_values(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack, size_t begin, const Decision& decision);

// Whether an argument, or an element of one, is on the meta device.
bool lacks_values(const Stack& stack, size_t begin);

// A call inside Spmd without distributed tensors: as if the region were not there.
void run_plain(const c10::OperatorHandle& op, Stack& stack);

// A result in the memory order that its layout reports, where that is row-major: what is decided by the order of memory, as whether a
// view is possible, is then decided alike on every rank.
at::Tensor in_reported_order(at::Tensor local, const Layout& layout);

// Arguments (stack[begin..], local parts) that lie over one that is written, but otherwise: copied, as kernels would refuse some, and on
// some ranks only.
void part_overlapping(const OpInfo& info, Stack& stack, size_t begin);

// Whether two local tensors are parts of one memory, and not the same.
inline bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         (a.storage_offset() != b.storage_offset() || a.sizes() != b.sizes() || a.strides() != b.strides());
}

// Whether the operator makes tensors from nothing.
bool is_factory(const OpInfo& info);
// Factories make tensors of the host, if nobody says where: where they have no device, they get the mesh's.
void make_on_mesh(const OpInfo& info, Stack& stack, size_t begin, const DeviceMesh& mesh);
// Whether a factory was asked for a device that is not the mesh's. (Without a device it makes tensors on the mesh's.)
bool is_made_elsewhere(const OpInfo& info, Stack& stack, size_t begin, const DeviceMesh& mesh);

// Views are pinned as their operand is, and of a group's member they are the member too, whose group learns what is written to them. So are
// flat casts.
inline void inherit(const DTensorImpl& operand, DTensorImpl& result) {
  if (operand.member()) [[unlikely]] result.set_member(operand.member());
  result.pinned = operand.pinned;
  result.module = operand.module;
  result.track_as(operand.key_set());
}
void inherit(const Decision& decision, const c10::IValue& operand, const c10::IValue& results);

// resize_, set_, as_strided_: of a tensor of which this rank has the memory as one device has it, the operator runs on the part, and the tensor
// becomes what the part then is. False where it is not so.
bool change_metadata(const c10::OperatorHandle& op, Stack& stack, size_t begin);

// Groups learn what is written.
void note_written(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// A view is a copy when its operand was moved or the local memory order allows no view.
void part_copied_view(const Decision& decision, const c10::IValue& base, const at::Tensor& view);

// Where a base begins in the memory of one device: in bytes, since its view may be of another dtype.
inline int64_t offset_in_bytes(const c10::TensorImpl& base) { return base.storage_offset() * static_cast<int64_t>(base.dtype().itemsize()); }

// Gives a view (output `index`) its place in the memory that its base would have on one device.
inline void set_view_offset(const Decision& decision, size_t index, int64_t base_offset, const at::Tensor& view) {
  const auto offset = decision.from_memory ? decision.offsets[index] : base_offset + (decision.offsets.empty() ? 0 : decision.offsets[index]);
  if (offset != 0) view.unsafeGetTensorImpl()->set_storage_offset(offset);
}

}  // namespace dtensor::dispatch
