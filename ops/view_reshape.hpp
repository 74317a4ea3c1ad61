// The algebra of cuts under a reshape: which cut of the output holds, on every rank, the elements of a cut of the input.
//
// A Shard of a dim sees the row-major sequence of the elements as (K, middle, U): K blocks, each cut in chunks of whole units of
// U elements. For dim d with the dims before it of product P and those after it of product Q, Shard(d, split, unit) has
// K = P * split and U = unit * Q. Any dim of the other shape whose P' divides K and whose Q' divides the chunks names the same cut.
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
  // far; nothing when no placement names it. Exact on every rank, uneven and empty parts included.
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
  std::vector<Pair> local_;  // (in, out) of every kind of rank that holds anything: uneven cuts make several kinds
};

}  // namespace dtensor::rules
