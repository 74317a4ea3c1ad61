// An operator that throws once its call is decided on: maybe on this rank alone, which has then made a call less than the others.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// In a catch block: throws the error again, with the operator, its operands and the rank where libtorch's own kernel threw it. The others are
// told with this rank's next call, see src/comm/failed_operators.hpp.
[[noreturn]] void rethrow_failure(const Decision& decision);
// Tells the others, in a catch block, of a function that threw, equal `call`s of which are the same on every rank of `mesh`.
void note_failure(const DeviceMesh& mesh, std::string_view function, std::string_view call) noexcept;

}  // namespace dtensor::dispatch
