// Placements under a reshape: finds the Shard of the output that gives every rank the same elements as a Shard of the input.
//
// A Shard sees the row-major sequence of elements as (K, middle, U): K blocks, each cut in chunks of whole units of U elements. Let P be
// the product of the dims before dim d, and Q that of the dims after it. Then Shard(d, split, unit) has K = P * split and U = unit * Q. A
// dim of the other shape can express the same cut if its P' divides K and its Q' divides the chunks.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <optional>
#include <vector>

namespace dtensor::rules {

// Two shapes of one row-major sequence, and the cuts made so far on both.
class Reshape {
 public:
  Reshape(c10::IntArrayRef in, c10::IntArrayRef out);

  // The Shard of the output that is the same cut as the Shard `in` of the input, over `parts` ranks, on top of the cuts made so
  // far; nullopt if no placement expresses it. Exact on every rank, uneven and empty shards included.
  std::optional<Placement> forward(const Placement& in, int64_t parts) const;

  // The same from the output to the input.
  std::optional<Placement> backward(const Placement& out, int64_t parts) const;

  // Makes a cut: `out` is what forward() gave for `in`.
  void apply(const Placement& in, const Placement& out, int64_t parts);

  // A pair of local shapes of one sequence.
  struct Pair {
    Sizes from, to;
    bool operator==(const Pair&) const = default;
  };

 private:
  std::vector<Pair> local_;  // (in, out) of every kind of rank that has elements: uneven cuts make several kinds
};

}  // namespace dtensor::rules
