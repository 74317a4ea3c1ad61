// Moving a tensor from one layout to another: the planner, its cost model and the transitions.
#pragma once

#include <dtensor/comm/work.hpp>
#include <dtensor/mesh/layout.hpp>

#include <string>
#include <string_view>
#include <vector>

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

// The cheapest sequence of transitions between two layouts of one tensor (same mesh, sizes and dtype). Every rank
// computes the same plan from the same layouts; nothing is communicated. Plans are cached, so a second call only copies
// one.
MovePlan plan_move(const LayoutPtr& from, const LayoutPtr& to);

// The estimated time of plan_move, in seconds; 0 when nothing is communicated or copied. The resolver's cost.
double move_seconds(const LayoutPtr& from, const LayoutPtr& to);

// The cost model: per mesh dimension latency and bandwidth, plus the price of a local copy.
struct CommCost {
  double latency = 20e-6;        // seconds per collective
  double bandwidth = 5e9;        // bytes per second and rank
  double copy_bandwidth = 1e10;  // bytes per second, local
};

// Sets the cost of the mesh dimensions called `mesh_dim` ("" for all that have none of their own) in the calling rank's
// world. Every rank must set the same, or their plans differ. Forgets the plans made so far. The file named by the
// environment's DTENSOR_COST_FILE is read first:
//   {"default": {"latency": 20e-6, "bandwidth": 5e9, "copy_bandwidth": 1e10}, "tp": {"bandwidth": 2e11}}
// Throws when a number is not positive (latency may be 0), and for a file that cannot be read.
void set_comm_cost(std::string_view mesh_dim, const CommCost& cost);

// The cost of a mesh dimension: its own, else the default.
CommCost comm_cost(const DeviceMesh& mesh, int64_t dim);

// Runs the plan on this rank's `local` tensor (plain, in any strides; sizes as `from` says). All ranks of the mesh call
// it together. The result's last collective may be under way, and until it is done `local` must not be written. The
// result may share memory with `local` when nothing had to be communicated: no step, a replicated tensor's chunk (a
// view) or a partial tensor that keeps its values. Whoever hands it to a user that may write to it clones it then.
comm::Async move_local(const at::Tensor& local, const LayoutPtr& from, const LayoutPtr& to);

// The calling rank's part, as `layout` places it, of a plain tensor that every rank has whole; of any dtype. May be a view. Communicates
// nothing.
at::Tensor own_part(const at::Tensor& whole, const Layout& layout);

}  // namespace dtensor
