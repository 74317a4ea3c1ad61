// What the command line and the environment say of how a program is launched.
#pragma once

#include <dtensor/mesh/world.hpp>

namespace dtensor::detail {

// A longer deadline (31 years) is this one: with more, a clock that counts nanoseconds runs over.
constexpr std::chrono::seconds kLongestDeadline{1'000'000'000};

// Reads --ranks, --transport and --deadline, and DTENSOR_DEADLINE. Throws for what does not parse, naming it.
LaunchOptions parse_options(int argc, char** argv);

}  // namespace dtensor::detail
