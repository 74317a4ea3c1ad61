// Tells which recorded calls give the same bits when a rank computes only its shard.
#pragma once

#include "src/deferred/tape.hpp"

namespace dtensor::deferred {

// False for operators that add up elements, and for functions whose kernels compute some elements differently from others: those at the end
// of the memory, beyond the last whole vector.
bool exact_in_shards(const Entry& entry);

}  // namespace dtensor::deferred
