// The steps of an operator call on DTensors that the boxed fallback and the typed kernels share.
#pragma once

#include "src/dispatch/cache.hpp"
#include "src/dispatch/decision.hpp"
#include "src/dispatch/region.hpp"

#include <dtensor/dispatch/backward.hpp>

#include <c10/core/DefaultDtype.h>

namespace dtensor::dispatch {

// Handles every call that no typed kernel takes, and every call without a decision.
void fallback(const c10::OperatorHandle& op, c10::Stack* stack);

// Begins a key: the operator, the region, and the default dtype, to which arithmetic promotes whole numbers (in bits that no address uses).
inline void begin_key(Key& key, const c10::OperatorHandle& op) {
  key.push(static_cast<const void*>(&op.schema()));
  key.push(region | (current_backward() ? kBackward : 0) | static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 56);
}

// The decision on a call; null if the call is new. If the decision depends on the call's floating-point arguments, adds them to the key.
inline const std::shared_ptr<const Decision>* find_decision(Key& key) {
  auto& cache = DecisionCache::of_this_thread();
  const auto* found = cache.find(key, key.hash());
  if (!found || !(*found)->reads_numbers) [[likely]]
    return found;
  key.add_numbers();
  return cache.find(key, key.hash());
}

}  // namespace dtensor::dispatch
