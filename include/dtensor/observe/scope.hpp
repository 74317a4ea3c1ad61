// Named parts of a program, in traces, counts and reports.
#pragma once

#include <dtensor/comm/event.hpp>
#include <dtensor/mesh/world.hpp>

#include <string>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor {

// From construction to destruction this thread's work is `name`'s: a span in a dt::Trace, and the module of what is communicated where no
// named parameter tells it. Scopes nest. Nothing is communicated.
//
//   dt::Scope scope("layers.3");
class Scope {
 public:
  explicit Scope(std::string name) : scope_(World::current().local<comm::Events>(), std::move(name)) {}

 private:
  comm::EventScope scope_;
};

}  // namespace dtensor

#pragma GCC visibility pop
