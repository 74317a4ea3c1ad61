#include <dtensor/parallel/parallelize.hpp>

#include <dtensor/error.hpp>
#include <dtensor/tensor.hpp>

#include <torch/nn/module.h>

namespace dtensor {

namespace {

bool matches_one(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') {
    for (size_t skip = 0; skip <= name.size(); ++skip) {
      if (matches_one(pattern.substr(1), name.substr(skip))) return true;
    }
    return false;
  }
  return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) && matches_one(pattern.substr(1), name.substr(1));
}

bool matches(std::string_view pattern, std::string_view name) {
  for (size_t bar; (bar = pattern.find('|')) != std::string_view::npos; pattern.remove_prefix(bar + 1)) {
    if (matches_one(pattern.substr(0, bar), name)) return true;
  }
  return matches_one(pattern, name);
}

Placements placements_of(const PlanEntry& entry, const DeviceMesh& mesh) {
  Placements placements(mesh.ndim(), replicate());
  for (const auto& [name, placement] : entry.placements) placements[mesh.dim(name)] = placement;
  return placements;
}

struct Change {
  std::string name;
  at::Tensor tensor;
  Placements placements;
};

std::vector<std::pair<std::string, at::Tensor>> tensors_of(torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : module.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) all.emplace_back(item.key(), item.value());
  return all;
}

// Checks the whole plan, so that a bad one changes nothing.
std::vector<Change> changes_of(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan) {
  std::vector<Change> changes;
  std::vector<bool> used(plan.size(), false);
  for (const auto& [name, tensor] : tensors_of(module)) {
    if (!tensor.defined()) continue;
    require(is_dtensor(tensor), "parallelize_module",
            "'{}' is a plain tensor; hint: build the module inside dt::Spmd on the mesh, so that its parameters are distributed "
            "from the start",
            name);
    require(DTensor(tensor).mesh() == mesh, "parallelize_module", "'{}' lies on another mesh; got {}; expected {}", name,
            DTensor(tensor).mesh().str(), mesh.str());
    for (size_t i = 0; i < plan.size(); ++i) {
      if (!matches(plan[i].pattern, name)) continue;
      used[i] = true;
      auto placements = placements_of(plan[i], mesh);
      try {
        DTensor(tensor).layout().with(placements);
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
    require(used[i] || hidden, "parallelize_module",
            "no parameter or buffer is decided by entry '{}'; hint: names are fully qualified, e.g. '{}'", plan[i].pattern,
            tensors_of(module).empty() ? "" : tensors_of(module).front().first);
  }
  return changes;
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan) {
  for (const auto& change : changes_of(module, mesh, plan)) redistribute_(change.tensor, change.placements);
}

}  // namespace dtensor
