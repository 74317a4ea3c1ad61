// How a group gets its batch and keeps its results: HybridFlow's transfer protocols, as functions from a layout to a layout.
#pragma once

#include <dtensor/rl/rows.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

using Relayout = std::function<RowLayout(const RowLayout&)>;

// `dispatch` is given the group's mesh with all rows on every rank, and says how the batch comes: the method runs on the ranks of that
// layout's mesh, which are some of the group or all. `collect` is given what dispatch gave, and says how results are kept, on the same
// mesh.
struct Mode {
  std::string name;
  Relayout dispatch, collect;
  // What a method returns as a plain tensor is this rank's rows under `collect`, and not the same on all ranks.
  bool own_results = false;
};

// Every rank has the whole batch, and results are the same on all.
Mode one_to_all();
// Each rank has its part of the rows, over all dimensions of the mesh, and results stay there.
Mode all_to_all();
// The group's first rank alone runs the method.
Mode rank_zero();
// Rows over the named dimensions; ranks that differ along others have the same ones. Results stay so.
Mode over(std::vector<std::string> dims);
// Over "dp": forward and backward passes of data parallel replicas.
Mode dp_compute();
// The same, and results are numbers of each replica: one row for each (a plain tensor [] or [n] of its own gives one, or n).
Mode dp_compute_metric();

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {
inline RowLayout stay(const RowLayout& layout) { return layout; }
}  // namespace detail

inline Mode one_to_all() { return {"one_to_all", detail::stay, detail::stay}; }

inline Mode over(std::vector<std::string> dims) {
  std::string name = "over";
  for (const auto& dim : dims) name += " " + dim;
  return {name, [dims = std::move(dims)](const RowLayout& group) { return rows_over(group.mesh, dims); }, detail::stay};
}

inline Mode all_to_all() {
  return {"all_to_all", [](const RowLayout& group) { return rows_over(group.mesh, group.mesh.names()); }, detail::stay};
}

inline Mode rank_zero() {
  const auto first = [](const RowLayout& group) {
    const auto& mesh = group.mesh;
    return whole_rows(DeviceMesh(mesh.device_type(), {mesh.ranks().front()}, {1}, {mesh.names().front()}));
  };
  return {"rank_zero", first, detail::stay};
}

inline Mode dp_compute() {
  return {"dp_compute", [](const RowLayout& group) { return rows_over(group.mesh); }, detail::stay};
}

inline Mode dp_compute_metric() {
  auto mode = dp_compute();
  mode.name = "dp_compute_metric";
  mode.own_results = true;
  return mode;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
