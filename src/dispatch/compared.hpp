// What is compared between the ranks of a mesh, and how often.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <cstdint>
#include <unordered_set>

namespace dtensor::dispatch {

// The plain tensors and generators of one mesh that were compared between its ranks. What a rank remembers of calls does not say: a rank
// that was busy on other meshes has forgotten other calls than its peers.
struct Compared {
  int64_t distributed = 0;              // by distribute_tensor: how many there were, of which some were compared
  std::unordered_set<size_t> operands;  // of operators, by a hash of what they were: those that were the first of their kind
  int64_t calls = 0;                    // of operators with such operands
  int64_t draws = 0;                    // of random operators

  // Which of them are compared: the first ones, where most programs go wrong, and some for as long as it trains.
  static bool is_due(int64_t count) {
    constexpr int64_t kFirst = 16, kEvery = 1024;
    return count < kFirst || count % kEvery == 0 || (count & (count - 1)) == 0;
  }
};

// The calling rank's, of a mesh.
Compared& compared(const DeviceMesh& mesh);

}  // namespace dtensor::dispatch
