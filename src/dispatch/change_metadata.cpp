#include "src/dispatch/execute.hpp"
#include "src/dispatch/region.hpp"

#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

namespace dtensor::dispatch {

namespace {

// The part of a tensor whose memory is that of one device; of a plain one itself, where it counts as replicated.
at::Tensor whole_local(const at::Tensor& tensor) {
  auto* impl = as_dtensor(tensor);
  if (!impl) return current_mesh ? tensor : at::Tensor();
  if (impl->layout()->is_deferred() || impl->member() || !impl->lends_memory()) return {};
  const auto& part = impl->local();
  return part.storage_offset() == impl->storage_offset() ? part : at::Tensor();
}

}  // namespace

bool change_metadata(const c10::OperatorHandle& op, Stack& stack, size_t begin) {
  const auto self = stack[begin].toTensor();
  if (!as_dtensor(self)) return false;
  // What draws into `out` begins so.
  const bool resizes = op.schema().name() == "aten::resize_";
  if (resizes && stack[begin + 2].isNone() && self.sizes() == c10::IntArrayRef(stack[begin + 1].toIntVector())) {
    stack.resize(begin + 1);
    return true;
  }
  Stack local(stack.begin() + static_cast<int64_t>(begin), stack.end());
  for (auto& value : local) {
    if (!value.isTensor()) continue;
    value = whole_local(value.toTensor());
    if (!value.toTensor().defined()) return false;
  }
  auto part = local[0].toTensor();
  part = detail::alias(part, part.sizes(), part.strides(), part.storage_offset());  // others may hold the part
  local[0] = part;
  {
    LocalMode local_mode;
    op.callBoxed(&local);
  }
  const auto& mesh = as_dtensor(self)->layout()->mesh();
  const Placements whole(mesh.ndim(), replicate());
  const auto now = wrap(part, Layout::get(mesh, whole, part.sizes(), part.strides(), part.scalar_type()));
  now.unsafeGetTensorImpl()->set_storage_offset(part.storage_offset());
  self.unsafeGetTensorImpl()->shallow_copy_from(now.getIntrusivePtr());
  stack.resize(begin);
  stack.emplace_back(self);
  return true;
}

}  // namespace dtensor::dispatch
