// What an operator call may choose from.
#pragma once

#include <dtensor/mesh/placement.hpp>

#include <cstdint>
#include <string>

namespace dtensor {

// A combination of placements on one mesh dimension, given what was chosen on those before.
struct PlacementOption {
  Placements in, out;          // one per operand, one per output
  double seconds = 0;          // estimated, of the moves and of what the local call communicates
  int moves = 0;               // operands that would be moved
  int64_t memory = 0;          // elements of the outputs on a rank
  int64_t lowering_bytes = 0;  // that the local call communicates, per rank
  bool chosen = false;
  std::string dropped;         // why it is not possible here; empty: it is
};

}  // namespace dtensor
