// What dt::load does once the index is there.
#pragma once

#include "src/checkpoint/read_plan.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>

namespace dtensor::checkpoints {

inline constexpr const char* kLoad = "load";

// Loads the state from the files that the index names, in `index.folder` of each rank. Every rank calls it; it throws on all.
void load(const State& state, const Index& index, const LoadOptions& options, const Everyone& everyone, const SeenBy& seen_by = {});

}  // namespace dtensor::checkpoints
