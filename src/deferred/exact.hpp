// Which recorded calls give the same bits when a rank does its part only.
#pragma once

#include "src/deferred/tape.hpp"

namespace dtensor::deferred {

// False for what adds up elements, and for functions of which a kernel computes some elements otherwise than others: those at the end of
// the memory that it works on, beyond the last whole vector.
bool exact_in_parts(const Entry& entry);

}  // namespace dtensor::deferred
