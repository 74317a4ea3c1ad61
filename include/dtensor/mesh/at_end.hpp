// What is still to be done when a rank's program has returned.
#pragma once

#include <functional>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::detail {

// One in each rank's World: `world.local<AtEnd>()`. dt::launch calls these in order, on the rank's thread, once the program has returned
// there, and not where it throws. What they throw is the rank's error. They must not communicate: other ranks may still be at work.
struct AtEnd {
  std::vector<std::function<void()>> calls;
};

}  // namespace dtensor::detail

#pragma GCC visibility pop
