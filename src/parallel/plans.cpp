#include <dtensor/parallel/plans.hpp>

#include "src/parallel/patterns.hpp"

namespace dtensor {

ParallelStyle ColwiseParallel(int64_t blocks) { return {{"weight", strided_shard(0, blocks)}, {"bias", strided_shard(0, blocks)}}; }
ParallelStyle RowwiseParallel() { return {{"weight", shard(1)}}; }
ParallelStyle VocabParallel() { return {{"weight", shard(0)}, {"bias", shard(0)}}; }
ParallelStyle SequenceParallel() { return {{"weight", replicate()}, {"bias", replicate()}}; }

Plan tensor_parallel(const std::vector<std::pair<std::string, ParallelStyle>>& modules, const std::string& mesh_dim) {
  Plan plan;
  for (const auto& [pattern, style] : modules) {
    for (const auto& [parameter, placement] : style) {
      plan.push_back({detail::inside(pattern, parameter), {{mesh_dim, placement}}, /*may_match_nothing=*/parameter != "weight"});
    }
  }
  return plan;
}

}  // namespace dtensor
