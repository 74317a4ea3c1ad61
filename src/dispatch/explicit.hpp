// dt::explicit_communication: implicit moves as errors.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// Throws when communication must be explicit in this thread and a move of the decision communicates.
void check_explicit(const Decision& decision);

}  // namespace dtensor::dispatch
