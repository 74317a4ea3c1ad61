// Which reductions a conversion of dtypes passes through.
#pragma once

#include "ops/pointwise.hpp"

#include <algorithm>

namespace dtensor::rules {

// A conversion keeps sums as long as it is linear up to rounding: not where fractions or signs are cut off.
inline std::vector<ReduceOp> kept_by_conversion(at::ScalarType from, at::ScalarType to) {
  if (from == to || (at::isFloatingType(from) && at::isFloatingType(to))) return kAnyPartial;
  if (at::isIntegralType(from, /*includeBool=*/false) && at::isFloatingType(to)) {
    return {ReduceOp::sum, ReduceOp::min, ReduceOp::max};
  }
  return {};
}

// Those of `keeps` that an operator keeps which converts to its argument dtype first, if it has one.
inline std::vector<ReduceOp> kept_in_dtype(const Call& call, std::vector<ReduceOp> keeps) {
  const auto from = call.operands[0].layout->dtype();
  const bool converts = call.has("dtype") && !call.arg("dtype").isNone();
  const auto kept = kept_by_conversion(from, converts ? call.arg("dtype").toScalarType() : from);
  std::erase_if(keeps, [&](ReduceOp op) { return std::find(kept.begin(), kept.end(), op) == kept.end(); });
  return keeps;
}

}  // namespace dtensor::rules
