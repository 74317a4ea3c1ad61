// Finds operators that run whole on every rank although operands are sharded (dtensor/dispatch/replication_debug.hpp).
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// Describes such a call; null for other calls.
std::shared_ptr<const RanWhole> find_ran_whole(const OpInfo& info, const rules::Call& call, const rules::Resolution& resolution);

// Notes that such a call is made: counts it, or warns once on standard error if it is large enough.
void note_ran_whole(const Decision& decision);

}  // namespace dtensor::dispatch
