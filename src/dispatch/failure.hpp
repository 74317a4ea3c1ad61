// Handles an operator that throws after its call was decided on. It may throw on this rank only, which has then made one call less than
// others.
#pragma once

#include "src/dispatch/decision.hpp"

#include <dtensor/dispatch/failure.hpp>

namespace dtensor::dispatch {

// Call in a catch block. Throws the error again; if a kernel of libtorch threw it, adds the operator, its operands and the rank. This
// rank's next call tells the other ranks (src/comm/failed_operators.hpp).
[[noreturn]] void rethrow_failure(const Decision& decision);
}  // namespace dtensor::dispatch
