// Ranks that have a fake device each.
#pragma once

#include <dtensor/mesh/world.hpp>

#include <functional>
#include <string>
#include <vector>

namespace dtensor_tests {

// As launch does, with a thread for each process; the errors of all ranks, empty where there was none.
std::vector<std::string> run_gpus(int ranks, const std::function<void(dtensor::World&)>& body, int deadline_ms = 20'000);

std::string first_error(const std::vector<std::string>& errors);

}  // namespace dtensor_tests
