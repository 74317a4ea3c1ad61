// The operator calls recorded under DeferredInit, in order.
#pragma once

#include "src/dispatch/deferred.hpp"

#include <dtensor/mesh/device_mesh.hpp>

#include <optional>

namespace dtensor::deferred {

// A recorded call. Its tensors are tensors of the tape (on the meta device, identified by address) or constants. An entry without an
// operator is a constant.
struct Entry {
  std::optional<c10::OperatorHandle> op;
  DeviceMesh mesh;
  std::vector<c10::IValue> arguments;  // of a constant: its value
  std::vector<at::Tensor> outputs;     // the new tensors among the results, flattened
  std::vector<at::Tensor> written;     // the arguments that it writes
  int generator_at = -1;               // the argument that is a generator, as it was
  at::Generator generator = {};
};
using Entries = std::vector<const Entry*>;

// Calls visit(tensor) for each tensor of the tape among values.
template <class Visit>
void for_each_meta(c10::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (const auto& in : tensors_in(values)) {
    if (in.tensor.defined() && in.tensor.is_meta()) visit(in.tensor);
  }
}

// Identifies the memory of a tensor of the tape.
inline const c10::StorageImpl* memory_of(const at::Tensor& meta) { return meta.storage().unsafeGetStorageImpl(); }

class Tape {
 public:
  // The tape of the calling thread. It lives as long as a region or a deferred tensor of it.
  static std::shared_ptr<Tape> of_this_thread();

  void add(Entry entry) { entries_.push_back(std::move(entry)); }

  // The calls that are needed to compute `metas`, in order: those that made them, and those that wrote memory which these read.
  Entries needed_for(c10::ArrayRef<at::Tensor> metas) const;

  // The deferred tensors that share memory with `metas`, including these themselves.
  std::vector<c10::intrusive_ptr<dispatch::Deferred>> sharing_memory(c10::ArrayRef<at::Tensor> metas);

  // A deferred tensor for `meta`, replicated on `mesh`.
  static at::Tensor make_deferred(const std::shared_ptr<Tape>& tape, const at::Tensor& meta, const DeviceMesh& mesh);

 private:
  std::vector<Entry> entries_;
  std::vector<c10::weak_intrusive_ptr<dispatch::Deferred>> deferred_;
};

}  // namespace dtensor::deferred
