#include "src/deferred/tape.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <unordered_set>

namespace dtensor::deferred {

std::shared_ptr<Tape> Tape::of_this_thread() {
  static thread_local std::weak_ptr<Tape> current;
  auto tape = current.lock();
  if (!tape) current = tape = std::make_shared<Tape>();
  return tape;
}

Entries Tape::needed_for(c10::ArrayRef<at::Tensor> metas) const {
  std::unordered_set<const c10::TensorImpl*> tensors;
  std::unordered_set<const c10::StorageImpl*> memories;  // whose contents are needed where the scan, which goes back, is
  const auto need = [&](const at::Tensor& meta) {
    tensors.insert(meta.unsafeGetTensorImpl());
    memories.insert(memory_of(meta));
  };
  std::ranges::for_each(metas, need);
  Entries needed;
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    const auto makes = [&](const at::Tensor& output) { return tensors.count(output.unsafeGetTensorImpl()) > 0; };
    const auto writes = [&](const at::Tensor& written) { return memories.count(memory_of(written)) > 0; };
    if (std::ranges::none_of(entry->outputs, makes) &&
        std::ranges::none_of(entry->written, writes))
      continue;
    needed.push_back(&*entry);
    for_each_meta(entry->arguments, need);
  }
  std::ranges::reverse(needed);
  return needed;
}

std::vector<c10::intrusive_ptr<dispatch::Deferred>> Tape::sharing_memory(c10::ArrayRef<at::Tensor> metas) {
  std::unordered_set<const c10::StorageImpl*> memories;
  for (const auto& meta : metas) memories.insert(memory_of(meta));
  std::vector<c10::intrusive_ptr<dispatch::Deferred>> found;
  std::vector<c10::weak_intrusive_ptr<dispatch::Deferred>> alive;
  for (auto& weak : deferred_) {
    auto deferred = weak.lock();
    if (!deferred) continue;
    if (memories.count(memory_of(deferred->meta()))) found.push_back(deferred);
    alive.push_back(std::move(weak));
  }
  deferred_ = std::move(alive);
  return found;
}

at::Tensor Tape::make_deferred(const std::shared_ptr<Tape>& tape, const at::Tensor& meta, const DeviceMesh& mesh) {
  const Placements replicated(mesh.ndim(), replicate());
  LocalMode local;
  auto nothing = at::empty({0}, at::TensorOptions(meta.scalar_type()).device(c10::Device(mesh.device_type())));
  auto tensor = wrap(std::move(nothing), Layout::get(mesh, replicated, meta.sizes(), meta.strides(), meta.scalar_type())->deferred());
  auto deferred = c10::make_intrusive<dispatch::Deferred>(meta, tape);
  auto* impl = as_dtensor(tensor);
  impl->set_storage_offset(meta.storage_offset());
  impl->defer(deferred);
  tape->deferred_.emplace_back(deferred);
  return tensor;
}

}  // namespace dtensor::deferred
