// The transitions that make up a move, and what they share. One file per transition; see README.md.
#pragma once

#include <dtensor/redistribute/redistribute.hpp>

#include <functional>

namespace dtensor::redistribute {

enum class Transition : uint8_t {
  none,
  all_gather,
  reduce_scatter,
  all_reduce,
  all_to_all,
  chunk,
  to_partial,
  flat_all_gather,
  flat_reduce_scatter,
  flat_chunk,
  impossible
};
const char* name(Transition transition);

// The transition between two placements of one mesh dimension. `impossible` ones go through R.
Transition transition(const Placement& from, const Placement& to);

// Each runs a step of its kind on this rank's local tensor.
comm::Async all_gather(const at::Tensor& local, const Step& step);      // S -> R
comm::Async reduce_scatter(const at::Tensor& local, const Step& step);  // P -> S
comm::Async all_reduce(const at::Tensor& local, const Step& step);      // P -> R
comm::Async all_to_all(const at::Tensor& local, const Step& step);      // S -> S'
comm::Async chunk(const at::Tensor& local, const Step& step);           // R -> S
comm::Async to_partial(const at::Tensor& local, const Step& step);      // R -> P
comm::Async flat_all_gather(const at::Tensor& local, const Step& step);      // Flat -> R
comm::Async flat_reduce_scatter(const at::Tensor& local, const Step& step);  // P -> Flat
comm::Async flat_chunk(const at::Tensor& local, const Step& step);           // R -> Flat
comm::Async flat_of_one(const at::Tensor& local, const Step& step);          // from or to Flat, on a mesh dimension of one rank

// The ranks that a step communicates among.
inline comm::Communicator& group_of(const Step& step) { return step.before->mesh().communicator(step.mesh_dims); }

// The length of tensor dim `dim` in `layout` on every rank of the step's group, in group order.
std::vector<int64_t> piece_lengths(const Layout& layout, c10::IntArrayRef mesh_dims, int64_t dim);

// `tensor` as a flat list in which the pieces of dim `dim` come one after the other, the r-th with `lengths[r]`
// indices. The dim is seen as (split, length/split) and the pieces cut the inner part. Copies at most once.
at::Tensor pack(const at::Tensor& tensor, int64_t dim, int64_t split, c10::IntArrayRef lengths);

// Elements in each piece of a tensor of `sizes` that is cut along `dim` (whose own size does not matter).
std::vector<int64_t> piece_counts(c10::IntArrayRef sizes, int64_t dim, c10::IntArrayRef lengths);

// The inverse of pack, on the result of a collective that may be under way: a tensor of `sizes`.
comm::Async unpack(comm::Async flat, c10::IntArrayRef sizes, int64_t dim, int64_t split, c10::IntArrayRef lengths);

// `tensor` as contiguous memory without lazy bits; itself where it is that.
at::Tensor dense(const at::Tensor& tensor);

// The same, of one dimension; a view where it can be.
at::Tensor flat(const at::Tensor& tensor);

// `result`, after `pending` has ended and `finish` has run. `finish` runs at most once, at the first wait, under the
// dispatch state of the thread that called this; at once when nothing is pending.
comm::Async then(const comm::Async& pending, at::Tensor result, std::function<void()> finish);

// norm2 travels as a sum of squares, in float where the tensor's dtype could not hold them. These are the local shards of that, the
// identity for every other op.
at::Tensor before_reduction(const at::Tensor& local, ReduceOp op);
comm::Async after_reduction(comm::Async reduced, ReduceOp op, at::ScalarType dtype);
ReduceOp wire_op(ReduceOp op);

// Cost, in picoseconds: integers add exactly, so that equal costs are equal in any order of steps.
struct CostModel {
  CostModel(const Layout& layout);

  // The price of changing `mesh_dims` of `before` to `to`.
  int64_t step(PlacementsRef before, c10::IntArrayRef mesh_dims, const Placement& to) const;

  // Of the largest local tensor.
  double largest_bytes(PlacementsRef placements) const;

  std::vector<CommCost> costs;  // per mesh dimension
  c10::IntArrayRef mesh_sizes, sizes;
  int64_t element_size;
};

// Prices along a mesh dimension, in seconds, of `bytes` per rank: a step P -> R of that size; a sum that stays pending, and will be reduced
// later, as a rule by a step P -> S that other sums share; a local copy.
double all_reduce_seconds(const DeviceMesh& mesh, int64_t mesh_dim, int64_t bytes);
double pending_seconds(const DeviceMesh& mesh, int64_t mesh_dim, int64_t bytes);
double copy_seconds(const DeviceMesh& mesh, int64_t mesh_dim, double bytes);

// Dijkstra over the placements; the layouts must differ.
MovePlan find_plan(const LayoutPtr& from, const LayoutPtr& to);

}  // namespace dtensor::redistribute
