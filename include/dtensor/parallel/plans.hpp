// Plans of tensor parallelism: by styles, from the module itself, and printed.
#pragma once

#include <dtensor/parallel/parallelize.hpp>

#include <iosfwd>

namespace dtensor {

// How the parameters of a module lie, by their names in it ("weight").
using ParallelStyle = std::vector<std::pair<std::string, Placement>>;

// A linear layer cut along its outputs: weight [out, in] and bias [out] by rows. `blocks`: how many layers are fused in it (3 for a query-
// key-value weight, 2 for gate and up), each of which is cut.
ParallelStyle ColwiseParallel(int64_t blocks = 1);

// A linear layer cut along its inputs: weight [out, in] by columns; the bias is whole, and added once. Its output is Partial.
ParallelStyle RowwiseParallel();

// An embedding, or the layer that gives the logits, cut along the vocabulary. Of sharded logits cross entropy gathers nothing.
ParallelStyle VocabParallel();

// A norm in a sequence-parallel region: weight and bias are whole, and work on the positions that the rank has. That positions are cut is said
// where they come in: by the layout of the batch, or with lay_out(x, "tp", shard(1)). Gradients are Partial, and reduced when they are read.
ParallelStyle SequenceParallel();

// The entries of a plan for modules: patterns of their names, as in Plan, and a style. A parameter that such a module lacks (a bias) is no
// mistake; a pattern that matches no module is.
Plan tensor_parallel(const std::vector<std::pair<std::string, ParallelStyle>>& modules, const std::string& mesh_dim = "tp");

// The tensor-parallel plan of a transformer, from its modules, by two rules: the first linear layer of a pair is cut by columns, the
// second by rows (Shoeybi et al., "Megatron-LM", 2019; derived so in Redco, 2023). The model's width d is that of its first embedding or,
// without one, the inputs of its first linear layer. Of the linear layers that one module holds directly,
//   - one from some n to d is the second of a pair whose first ones go from d to n, or to fewer (grouped keys and values);
//   - where several go from d to d, the last of them is the second, and the others are first, with those that have no pair yet;
//   - one that has no pair (a router, a head) stays whole.
// A first layer with k times the outputs that the second takes holds k fused blocks. With `vocabulary`, embeddings and a layer from d to
// the first embedding's number of rows are cut along it. torch::nn::MultiheadAttention, whose projections are no layers, stays whole. Where
// nothing is cut, rank 0 says so and why on standard error: a plan without entries leaves the whole model on every rank.
Plan automatic_plan(const torch::nn::Module& module, const std::string& mesh_dim = "tp", bool vocabulary = false);

// A table of the module's parameters and buffers: name, dtype and shape, placements, bytes on this rank and whole. It says so where nothing
// is cut.
std::string describe_plan(const torch::nn::Module& module);
void print_plan(const torch::nn::Module& module, std::ostream& out);
void print_plan(const torch::nn::Module& module);  // to standard output

}  // namespace dtensor
