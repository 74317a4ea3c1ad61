// When pending sums stay pending, and how they are reduced for operators that cannot take them.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace dtensor::rules {

// Whether a backward pass runs on this thread; part of every key. In it, gradients stay pending sums through products with tensors that
// the forward pass saved, so that they are reduced once, where the sum of all incoming gradients is needed.
inline bool in_backward() { return torch::autograd::get_current_graph_task_exec_info() != nullptr; }

// Removes the combinations that would reduce_scatter a pending sum to a shard that no operand has yet. A reduce_scatter costs less than an
// all_reduce at this operator, but the operators after it would have to gather.
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
