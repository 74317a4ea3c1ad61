// How pending sums are reduced for operators that cannot take them.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <algorithm>

namespace dtensor::rules {

// Leaves out the combinations that would deal a pending sum out to ranks where no operand lies so yet. A reduce_scatter costs less than an
// all_reduce at this operator, but what follows would have to gather: of gradients in tensor parallelism once for the input's and once for the
// weight's.
inline void reduce_whole(const Call& call, int64_t mesh_dim, Candidates& candidates) {
  const auto now = [&](size_t i) -> const Placement& { return call.operands[i].placements()[mesh_dim]; };
  std::erase_if(candidates, [&](const Candidate& candidate) {
    bool deals_out = false, lies_so = false;
    for (size_t i = 0; i < call.operands.size(); ++i) {
      deals_out |= now(i).is_partial() && candidate.in[i].is_shard();
      lies_so |= candidate.in[i].is_shard() && now(i) == candidate.in[i];
    }
    return deals_out && !lies_so;
  });
}

}  // namespace dtensor::rules
