// The placements that an operator call can choose from.
#pragma once

#include <dtensor/mesh/placement.hpp>

#include <cstdint>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

// A combination of placements on one mesh dimension, given the choices for the mesh dimensions before it.
struct PlacementOption {
  Placements in, out;          // one per operand, one per output
  double seconds = 0;          // estimated time of the moves and of the communication inside the local call
  int moves = 0;               // number of operands that would be moved
  int64_t memory = 0;          // elements of the outputs on a rank
  int64_t lowering_bytes = 0;  // bytes that the local call communicates, per rank
  bool chosen = false;
  std::string dropped;         // why it is not possible here; empty if it is
};

}  // namespace dtensor

#pragma GCC visibility pop
