// dt::explicit_communication: makes implicit moves errors.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// Throws if communication must be explicit in this thread and a move of the decision communicates. Flat operands are not checked here;
// moved() checks each of their moves, since members of a group may be gathered: the user grouped them.
void check_explicit(const Decision& decision);
void check_explicit(const OpInfo& info, const Move& move);

// The same for one argument that would be communicated. `what` says how, as in "moved".
void check_explicit(const OpInfo& info, int argument, int element, std::string_view what, const Layout& from, const Layout& to);

}  // namespace dtensor::dispatch
