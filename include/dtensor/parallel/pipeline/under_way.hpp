// Whether this rank is inside a pipeline's step. Its ranks are at different actions then, so nothing that all of them have to call together
// may be called there. And whether a step failed: some messages of it were sent then, and others never will be.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/base/error_text.hpp>
#include <dtensor/mesh/world.hpp>

#include <atomic>
#include <exception>
#include <string>

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

// A step that failed on this rank, of any pipeline of several ranks. The others wait for messages that will not come, or have sent some
// that a later step would take for its own: so the job ends, as where an operator failed on one rank only.
class FailedStep {
 public:
  // Throws if there was one.
  static void refuse_later() {
    const auto& why = World::current().local<Why>().text;
    require(why.empty(), "pipeline",
            "a step failed before, and its ranks are out of step: they can make no further one; hint: end the program, and go on from a "
            "checkpoint; the step's error was: {}",
            why);
  }

  // Call in a catch block. What the other ranks wait for ends at once, with this error.
  static void tell() noexcept try {
    auto& world = World::current();
    auto& why = world.local<Why>().text;
    if (!why.empty()) return;
    why = dtensor::detail::text_of(std::current_exception());
    world.transport().leave(why);
  } catch (...) {
  }

 private:
  struct Why {
    std::string text;
  };
};

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
