// Moving a tensor from one layout to another: the planner, its cost model and the transitions.
#pragma once

#include <dtensor/comm/work.hpp>
#include <dtensor/mesh/layout.hpp>

#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// One transition along one mesh dimension, or along several that make the same transition at once.
struct Step {
  c10::SmallVector<int64_t, 4> mesh_dims;  // ascending
  Placement from, to;                      // of the first of mesh_dims
  LayoutPtr before, after;

  std::string str() const;  // "S(0) -> R: all_gather on tp"
};

struct MovePlan {
  std::vector<Step> steps;
  double seconds = 0;  // estimated

  // "S(0) -> R: all_gather on tp; ...; 12.3 us", or "nothing".
  std::string str() const;
};

// The cheapest sequence of transitions between two layouts of one tensor (same mesh, sizes and dtype). Communicates
// nothing: every rank computes the same plan from the same layouts. Plans are cached; a second call copies one.
MovePlan plan_move(const LayoutPtr& from, const LayoutPtr& to);

// The estimated time of plan_move, in seconds; 0 when nothing is communicated or copied. The resolver compares it.
double move_seconds(const LayoutPtr& from, const LayoutPtr& to);

// The cost model: per mesh dimension latency and bandwidth, plus the price of a local copy.
struct CommCost {
  double latency = 20e-6;        // seconds per collective
  double bandwidth = 5e9;        // bytes per second and rank
  double copy_bandwidth = 1e10;  // bytes per second, local
};

// Sets the cost of the mesh dimensions called `mesh_dim` in the calling rank's world ("" for all that have no cost of
// their own). Every rank must set the same, or their plans differ. Forgets the plans made so far. The file named by the
// environment variable DTENSOR_COST_FILE is read first:
//   {"default": {"latency": 20e-6, "bandwidth": 5e9, "copy_bandwidth": 1e10}, "tp": {"bandwidth": 2e11}}
// Throws when a number is not positive (latency may be 0), and for a file that cannot be read.
void set_comm_cost(std::string_view mesh_dim, const CommCost& cost);

// The cost of a mesh dimension: its own, else the default.
CommCost comm_cost(const DeviceMesh& mesh, int64_t dim);

// Runs the plan on this rank's `local` tensor (plain, any strides, the local sizes of `from`). All ranks of the mesh call
// it together. It may return before its last collective is done; do not write to `local` until then. If nothing had to be
// communicated (no step, a shard of a replicated tensor, a partial tensor that keeps its values), the result may share
// memory with `local`: clone it before you hand it to code that may write to it.
comm::Async move_local(const at::Tensor& local, const LayoutPtr& from, const LayoutPtr& to);

// The calling rank's shard under `layout` of a plain tensor that every rank has whole. Any dtype. May be a view. Communicates nothing.
at::Tensor own_shard(const at::Tensor& whole, const Layout& layout);

}  // namespace dtensor

#pragma GCC visibility pop
