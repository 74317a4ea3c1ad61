// Handles an operator that throws after its call was decided on. It may throw on this rank only, which has then made one call less than
// others.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// Call in a catch block. Throws the error again; if a kernel of libtorch threw it, adds the operator, its operands and the rank. This
// rank's next call tells the other ranks (src/comm/failed_operators.hpp).
[[noreturn]] void rethrow_failure(const Decision& decision);
// Call in a catch block. Notes for the other ranks that `function` threw. Every rank of `mesh` makes this call, described by an equal
// `call`.
void note_failure(const DeviceMesh& mesh, std::string_view function, std::string_view call) noexcept;

}  // namespace dtensor::dispatch
