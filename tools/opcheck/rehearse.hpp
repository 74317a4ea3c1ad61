// Operators tried on stand-ins for their operands, as dispatch tries them before they communicate. Of use under valgrind, which sees a
// kernel that reaches outside of its operands.
#pragma once

#include "tools/opcheck/operators.hpp"

#include <functional>
#include <string>
#include <vector>

namespace dtensor::opcheck {

struct Rehearsals {
  int64_t operators = 0;  // of which some call was rehearsed
  int64_t taken = 0, refused = 0, not_tried = 0;
};

// Every sample's shapes, and those with one length at a time as 1 and, beside integers, as 0. `tell` gets each call before it is tried.
Rehearsals rehearse_all(const std::vector<Operator>& operators, const std::function<void(const std::string&)>& tell);

}  // namespace dtensor::opcheck
