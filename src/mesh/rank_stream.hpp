// The random stream of a rank. World keeps it; the layer that makes it (rng/rank_generator.cpp) sets these while the library is loaded.
#pragma once

#include <ATen/core/Generator.h>

namespace dtensor {
class World;
}

namespace dtensor::detail {

struct RankStream {
  at::Generator (*make)(int ranks) = nullptr;  // of one of so many ranks
  void (*use)(bool on) = nullptr;              // whether operators of the calling thread draw from their rank's
  void (*forget)(World& world) = nullptr;      // which ends
};

extern RankStream rank_stream;

}  // namespace dtensor::detail
