// dt::explicit_communication: implicit moves as errors.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// Throws when communication must be explicit in this thread and a move of the decision communicates. Not of flat operands: moved() asks for
// them by the move, since those of a group are gathered because the user grouped them.
void check_explicit(const Decision& decision);
void check_explicit(const OpInfo& info, const Move& move);

// The same for one argument, which is communicated: `what` it would be, "moved".
void check_explicit(const OpInfo& info, int argument, int element, std::string_view what, const Layout& from, const Layout& to);

}  // namespace dtensor::dispatch
