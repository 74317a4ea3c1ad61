// The way of an operator call on DTensors, for the boxed fallback and the typed kernels.
#pragma once

#include "src/dispatch/cache.hpp"
#include "src/dispatch/decision.hpp"
#include "src/dispatch/region.hpp"

#include <dtensor/dispatch/backward.hpp>

#include <c10/core/DefaultDtype.h>

namespace dtensor::dispatch {

// Every call that no typed kernel takes, and every one that is new.
void fallback(const c10::OperatorHandle& op, c10::Stack* stack);

// What a key begins with. (The default dtype, which whole numbers become in arithmetic with others, in bits that no address has.)
inline void begin_key(Key& key, const c10::OperatorHandle& op) {
  key.push(static_cast<const void*>(&op.schema()));
  key.push(region | (current_backward() ? kBackward : 0) | static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 56);
}

// The decision on a call, null when it is new. Completes the key where the decision depends on the call's numbers.
inline const std::shared_ptr<const Decision>* find_decision(Key& key) {
  auto& cache = DecisionCache::of_this_thread();
  const auto* found = cache.find(key, key.hash());
  if (!found || !(*found)->reads_numbers) [[likely]]
    return found;
  key.add_numbers();
  return cache.find(key, key.hash());
}

}  // namespace dtensor::dispatch
