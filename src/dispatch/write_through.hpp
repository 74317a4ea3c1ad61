// A write to a tensor of which a view had to be copied, or to the copy: carried over to where on one device it would show.
#pragma once

#include "src/dispatch/decision.hpp"
#include "src/dispatch/parted.hpp"

#include <vector>

namespace dtensor::dispatch {

// A tensor that is about to be written, and the memories that will have missed it.
struct Written {
  at::Tensor tensor;
  std::vector<Held> others;
};

// Those of a call's arguments that others would miss; of most calls none. Throws, before anything is written, for views of another
// dtype, and inside dt::explicit_communication for what would have to be gathered.
std::vector<Written> written_beside(const OpInfo& info, const Stack& stack, size_t begin);

// After the write. Gathers what was written where it is cut or Partial; every rank of the mesh takes part.
void write_through(const std::vector<Written>& all);

}  // namespace dtensor::dispatch
