// An operator that throws once its call is decided on: maybe on this rank alone, which has then made a call less than the others.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// Tells the others with this rank's next call, see src/comm/failed_operators.hpp. In a catch block.
void note_failure(const Decision& decision) noexcept;
// The same of a function, equal `call`s of which are the same on every rank of `mesh`.
void note_failure(const DeviceMesh& mesh, std::string_view function, std::string_view call) noexcept;

}  // namespace dtensor::dispatch
