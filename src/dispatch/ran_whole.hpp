// Operators that run whole on every rank although operands come in cut (dtensor/dispatch/replication_debug.hpp).
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// What there is to tell of such a call, null of others.
std::shared_ptr<const RanWhole> find_ran_whole(const OpInfo& info, const rules::Call& call, const rules::Resolution& resolution);

// Such a call is made: it is counted, or told once on standard error where it is worth it.
void note_ran_whole(const Decision& decision);

}  // namespace dtensor::dispatch
