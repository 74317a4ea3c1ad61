// Carries a write over between a tensor and a copied view of it, to all tensors that would show the write on one device.
#pragma once

#include "src/dispatch/decision.hpp"
#include "src/dispatch/copied_views.hpp"
#include "src/dispatch/reading.hpp"

#include <vector>

namespace dtensor::dispatch {

// Whoever saved the local shard for a backward pass, as a function of local_map() does, is to notice the write: libtorch counts writes to
// the distributed tensor only.
inline void count_write(const at::Tensor& local) {
  if (!local.is_inference()) [[likely]] local.unsafeGetTensorImpl()->bump_version();
}

// Every write of an operator to a tensor begins here, before the local call: moves that still read the memory end first, and the tensor's
// group learns of it.
inline void begin_write(DTensorImpl& impl) {
  before_write(impl.local());
  count_write(impl.local());
  impl.note_written();
}

// A tensor that is about to be written, and the tensors to which the write has to be carried over.
struct Written {
  at::Tensor tensor;
  std::vector<Held> others;
};

// Begins the writes of a call. Returns those that have to be carried over; most calls have none. Throws, before anything is written, for
// views of another dtype, and inside dt::explicit_communication if the written tensor would have to be gathered.
std::vector<Written> begin_writes(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// Call after the local call. Gathers a written tensor if it is sharded or Partial; every rank of the mesh takes part.
void carry_over(const std::vector<Written>& all);

// Tells groups which of their members are written. Call it again at the end if the call moved something: a group may have gathered the
// operand before the write.
void note_written(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

}  // namespace dtensor::dispatch
