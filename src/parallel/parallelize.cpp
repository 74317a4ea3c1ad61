#include <dtensor/parallel/parallelize.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/parallel/patterns.hpp>
#include <dtensor/tensor/tensor.hpp>

#include "src/parallel/tensors_of.hpp"

#include <dtensor/mesh/two_meshes.hpp>

#include <algorithm>
#include <set>

namespace dtensor {

namespace {

Placements placements_of(const PlanEntry& entry, const DeviceMesh& mesh) {
  Placements placements(mesh.ndim(), replicate());
  std::set<int64_t> given;
  for (const auto& [name, placement] : entry.placements) {
    const auto m = mesh.dim(name);
    require(given.insert(m).second, "parallelize_module", "entry '{}' has two placements along \"{}\"", entry.pattern, name);
    require(!placement.is_partial(), "parallelize_module",
            "entry '{}' makes parameters pending sums along \"{}\"; expected replicate() or a shard", entry.pattern, name);
    placements[m] = placement;
  }
  return placements;
}

struct Change {
  std::string name;
  at::Tensor tensor;
  Placements placements;
};

// Checks the whole plan, so that a bad one changes nothing.
std::vector<Change> changes_of(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan) {
  std::vector<Change> changes;
  std::vector<bool> used(plan.size(), false);
  const auto tensors = detail::tensors_of(module);
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) continue;
    require(is_dtensor(tensor), "parallelize_module",
            "'{}' is a plain tensor; hint: build the module inside dt::Spmd on the mesh, so that its parameters are distributed "
            "from the start",
            name);
    require(DTensor(tensor).mesh() == mesh, "parallelize_module",
            "'{}' lies on another mesh; got {}; expected {}; {}; a plan takes the whole mesh that the module was made on, and names its "
            "dimensions",
            name, DTensor(tensor).mesh().str(), mesh.str(), why_two(DTensor(tensor).mesh(), mesh));
    for (size_t i = 0; i < plan.size(); ++i) {
      if (!detail::matches(plan[i].pattern, name)) continue;
      used[i] = true;
      auto placements = placements_of(plan[i], mesh);
      const auto& layout = DTensor(tensor).layout();
      require(
          !layout.is_flat() || placements[layout.flat_dim()].is_replicate(), "parallelize_module",
          "entry '{}' cuts '{}' along \"{}\", where fully_shard cuts it already; got {}; hint: leave this mesh dimension out of the plan",
          plan[i].pattern, name, layout.is_flat() ? mesh.names()[layout.flat_dim()] : "", layout.str());
      try {
        layout.with(placements);
      } catch (const c10::Error& error) {
        fail("parallelize_module", "entry '{}' does not fit '{}': {}", plan[i].pattern, name, error.what_without_backtrace());
      }
      changes.push_back({name, tensor, std::move(placements)});
      break;
    }
  }
  for (size_t i = 0; i < plan.size(); ++i) {
    placements_of(plan[i], mesh);
    bool hidden = false;
    for (size_t j = 0; j < i && !used[i]; ++j) hidden |= plan[j].pattern == plan[i].pattern;
    if (used[i] || hidden || plan[i].may_match_nothing) continue;
    const bool earlier = std::ranges::any_of(tensors, [&](const auto& named) { return detail::matches(plan[i].pattern, named.first); });
    require(!earlier, "parallelize_module",
            "what entry '{}' matches is decided by entries before it; hint: the first that matches a name decides, so put the special ones "
            "first",
            plan[i].pattern);
    fail("parallelize_module", "no parameter or buffer is decided by entry '{}'; hint: names are fully qualified; the closest are {}",
         plan[i].pattern, detail::closest(plan[i].pattern, detail::names_of(tensors)));
  }
  return changes;
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan) {
  const auto changes = changes_of(module, mesh, plan);
  std::vector<c10::intrusive_ptr<FlatGroup>> units;  // parameters in a flat buffer are laid out anew, and put back
  for (const auto& change : changes) {
    auto* unit = group_of(change.tensor);
    const bool known = std::ranges::any_of(units, [&](const auto& other) { return other.get() == unit; });
    if (unit && !known) units.push_back(c10::intrusive_ptr<FlatGroup>::reclaim_copy(unit));
  }
  size_t dissolved = 0;
  try {
    for (const auto& unit : units) unit->dissolve(), ++dissolved;
  } catch (...) {
    for (size_t i = 0; i < dissolved; ++i) units[i]->restore();
    throw;
  }
  for (const auto& change : changes) {
    redistribute_(change.tensor, change.placements);
    pin(change.tensor);
  }
  for (const auto& unit : units) unit->restore();
  name_modules(module);
}

void name_modules(torch::nn::Module& module) {
  for (const auto& [name, tensor] : detail::tensors_of(module)) {
    const auto dot = name.rfind('.');
    if (tensor.defined() && is_dtensor(tensor)) name_module(tensor, dot == std::string::npos ? "" : name.substr(0, dot));
  }
}

}  // namespace dtensor
