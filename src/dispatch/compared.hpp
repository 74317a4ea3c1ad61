// Decides which plain tensors and generators are compared between the ranks of a mesh, and how often.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <cstdint>
#include <unordered_set>

namespace dtensor::dispatch {

// Counts what was compared between the ranks of one mesh. The cache of decisions cannot tell it: a rank that was busy on other meshes has
// forgotten other calls than its peers.
struct Compared {
  int64_t distributed = 0;              // tensors given to distribute_tensor, of which some were compared
  std::unordered_set<size_t> operands;  // kinds of plain operands that operators have had, as hashes
  int64_t calls = 0;                    // calls of operators with such operands
  int64_t draws = 0;                    // calls of random operators
  int64_t gradients = 0;                // small gradients of leaves that are whole on several ranks

  // Whether the `count`-th is compared: the first ones are, where most programs go wrong, and some of the later ones.
  static bool is_due(int64_t count) {
    constexpr int64_t kFirst = 16, kEvery = 1024;
    return count < kFirst || count % kEvery == 0 || (count & (count - 1)) == 0;
  }
};

// The counts of the calling rank for a mesh.
Compared& compared(const DeviceMesh& mesh);

}  // namespace dtensor::dispatch
