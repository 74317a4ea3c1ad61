// Carries a write over between a tensor and a copied view of it, to all tensors that would show the write on one device.
#pragma once

#include "src/dispatch/decision.hpp"
#include "src/dispatch/parted.hpp"

#include <vector>

namespace dtensor::dispatch {

// A tensor that is about to be written, and the tensors to which the write has to be carried over.
struct Written {
  at::Tensor tensor;
  std::vector<Held> others;
};

// The arguments of a call whose writes have to be carried over; most calls have none. Throws, before anything is written, for views of
// another dtype, and inside dt::explicit_communication if the written tensor would have to be gathered.
std::vector<Written> written_beside(const OpInfo& info, const Stack& stack, size_t begin);

// Call after the write. Gathers the written tensor if it is sharded or Partial; every rank of the mesh takes part.
void write_through(const std::vector<Written>& all);

}  // namespace dtensor::dispatch
