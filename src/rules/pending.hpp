// How pending sums are reduced for operators that cannot take them.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace dtensor::rules {

// Whether a backward pass runs on this thread, which is part of every key. Gradients stay pending sums through products with what the forward
// pass saved: the reduction is then done once, where the sum of all that comes in is needed.
inline bool in_backward() { return torch::autograd::get_current_graph_task_exec_info() != nullptr; }

// Leaves out the combinations that would deal a pending sum out to ranks where no operand lies so yet. A reduce_scatter costs less than an
// all_reduce at this operator, but what follows would have to gather.
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
