// What the tests of the core share: ranks as threads, a rank whose peers are never heard of, matching of error texts.
#pragma once

#include "catch.hpp"

#include <dtensor/mesh/world.hpp>

#include <functional>
#include <string>

namespace dtensor::test {

// Throws the error of the first rank to fail, after all have ended.
inline void on_ranks(int count, const std::function<void(World&)>& body, const std::string& transport = "threads") {
  LaunchOptions options;
  options.ranks = count;
  options.transport = transport;
  options.deadline = comm::Milliseconds(20'000);
  launch(options, body);
}

// A rank of a world whose other ranks are never heard of: enough where nothing is communicated.
struct Alone {
  explicit Alone(int size, int rank = 0) : world(std::move(comm::make_threads_transports(size)[rank])), use(world) {}
  World world;
  World::Use use;
};

inline auto says(const std::string& text) {
#ifdef TWOBLUECUBES_SINGLE_INCLUDE_CATCH_HPP_INCLUDED
  return Catch::Matchers::Contains(text);
#else
  return Catch::Matchers::ContainsSubstring(text);
#endif
}

}  // namespace dtensor::test
