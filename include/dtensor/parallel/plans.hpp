// Plans of tensor parallelism: by styles, from the module itself, and printed.
#pragma once

#include <dtensor/parallel/parallelize.hpp>
#include <dtensor/parallel/patterns.hpp>

#include <iosfwd>

#pragma GCC visibility push(default)

namespace dtensor {

// The placements of a module's parameters, by their names in the module ("weight").
using ParallelStyle = std::vector<std::pair<std::string, Placement>>;

// A linear layer sharded along its outputs: weight [out, in] and bias [out] by rows. `blocks` is the number of layers fused in it (3 for a
// query-key-value weight, 2 for gate and up); each of them is sharded.
ParallelStyle ColwiseParallel(int64_t blocks = 1);

// A linear layer sharded along its inputs: weight [out, in] by columns. The bias is replicated, and added once. The output is Partial.
ParallelStyle RowwiseParallel();

// An embedding, or the layer that computes the logits, sharded along the vocabulary. Cross entropy of sharded logits gathers nothing.
ParallelStyle VocabParallel();

// A norm in a sequence-parallel region: weight and bias are replicated, and apply to the rank's positions. The layout of the batch, or
// lay_out(x, "tp", shard(1)), shards the positions. Gradients are Partial, and reduced when they are read.
ParallelStyle SequenceParallel();

// A plan from patterns of module names, as in Plan, and a style for each. A module may lack a parameter of its style (a bias). A pattern
// that matches no module is an error.
Plan tensor_parallel(const std::vector<std::pair<std::string, ParallelStyle>>& modules, const std::string& mesh_dim = "tp");

// Derives the tensor-parallel plan of a transformer from its modules. Two rules shard them: the first linear layer of a pair by columns,
// the second by rows (Shoeybi et al., "Megatron-LM", 2019; derived so in Redco, 2023). Pairs are found by sizes. The model's width d is
// that of its first embedding or, without one, the number of inputs of its first linear layer. Among the linear layers that one module
// holds directly,
//   - a layer from some n to d is the second of a pair; the first ones go from d to n, or to fewer (grouped keys and values);
//   - if several layers go from d to d, the last of them is a second layer, and the others are first, with those that have no pair yet;
//   - a layer without a pair (a router, a head) stays whole.
// A first layer with k times the outputs that the second takes holds k fused blocks. With `vocabulary`, embeddings and a layer from d to
// the first embedding's number of rows are sharded along the vocabulary. torch::nn::MultiheadAttention stays whole, since its projections
// are not layers. If nothing is sharded, rank 0 says so, and why, on standard error: every rank then has the whole model.
Plan automatic_plan(const torch::nn::Module& module, const std::string& mesh_dim = "tp", bool vocabulary = false);

// A table of the module's parameters and buffers: name, dtype and shape, placements, bytes on this rank and in all. It also says if nothing
// is sharded.
std::string describe_plan(const torch::nn::Module& module);
void print_plan(const torch::nn::Module& module, std::ostream& out);
void print_plan(const torch::nn::Module& module);  // to standard output

// -- How -----------------------------------------------------------------------------------------------------------------

inline ParallelStyle ColwiseParallel(int64_t blocks) { return {{"weight", strided_shard(0, blocks)}, {"bias", strided_shard(0, blocks)}}; }
inline ParallelStyle RowwiseParallel() { return {{"weight", shard(1)}}; }
inline ParallelStyle VocabParallel() { return {{"weight", shard(0)}, {"bias", shard(0)}}; }
inline ParallelStyle SequenceParallel() { return {{"weight", replicate()}, {"bias", replicate()}}; }

inline Plan tensor_parallel(const std::vector<std::pair<std::string, ParallelStyle>>& modules, const std::string& mesh_dim) {
  Plan plan;
  for (const auto& [pattern, style] : modules) {
    for (const auto& [parameter, placement] : style) {
      plan.push_back({detail::inside(pattern, parameter), {{mesh_dim, placement}}, /*may_match_nothing=*/parameter != "weight"});
    }
  }
  return plan;
}

}  // namespace dtensor

#pragma GCC visibility pop
