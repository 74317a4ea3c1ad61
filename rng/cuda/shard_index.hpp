// Maps an element of a rank's shard to its index in the whole tensor. Plain C++ for host and device, small enough for a kernel's argument.
#pragma once

#include <dtensor/rng/philox.hpp>

#include <optional>

namespace dtensor {
class Layout;
}

namespace dtensor::rng::cuda {

struct ShardIndex {
  static constexpr int kAxes = 8, kPieces = 96;

  // A dim, or neighbouring ones of which the inner are whole: its length in the part and in the whole, and its pieces.
  struct Axis {
    int64_t local, global;
    int begin, end;
  };
  struct Piece {
    int64_t local, global;  // where it begins
  };

  int axes = 0;
  Axis axis[kAxes];  // the last varies fastest
  Piece piece[kPieces];

  DTENSOR_HOST_DEVICE int64_t global(int64_t local) const {
    int64_t result = 0, scale = 1;
    for (int a = axes - 1; a >= 0; --a) {
      const int64_t at = local % axis[a].local;
      local /= axis[a].local;
      int p = axis[a].begin;
      while (p + 1 < axis[a].end && piece[p + 1].local <= at) ++p;
      result += (piece[p].global + at - piece[p].local) * scale;
      scale *= axis[a].global;
    }
    return result;
  }
};

inline ShardIndex all_of(int64_t numel) { return {1, {{numel, numel, 0, 1}}, {{0, 0}}}; }

// Of the calling rank's shard, its elements and those of the whole taken in the order of `order`'s dims, the last of which varies fastest.
// None for a layout of too many pieces.
std::optional<ShardIndex> shard_index(const Layout& layout, const int64_t* order);

}  // namespace dtensor::rng::cuda
