// Whether this rank is inside a pipeline's step. Its ranks are at different actions then, so nothing that all of them have to call together
// may be called there.
#pragma once

#include <dtensor/mesh/world.hpp>

#include <atomic>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// From construction to destruction a step of the calling rank is under way.
class StepUnderWay {
 public:
  StepUnderWay() : count_(World::current().local<Count>().steps) { ++count_; }
  ~StepUnderWay() { --count_; }
  StepUnderWay(const StepUnderWay&) = delete;
  StepUnderWay& operator=(const StepUnderWay&) = delete;

  // Whether one is, also as threads of a backward pass see it.
  static bool any() { return World::current().local<Count>().steps > 0; }

 private:
  struct Count {
    std::atomic<int> steps = 0;
  };
  std::atomic<int>& count_;
};

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
