#include <dtensor/parallel/parallelize.hpp>

#include <dtensor/error.hpp>
#include <dtensor/tensor.hpp>

#include "src/parallel/tensors_of.hpp"

#include <algorithm>
#include <numeric>

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

// How many letters to change, add or leave out between two names (Levenshtein, 1966).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// The three names that are most like a pattern.
std::string closest(const std::string& pattern, const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<std::pair<size_t, std::string>> names;
  for (const auto& item : tensors) names.emplace_back(distance(pattern, item.first), item.first);
  std::stable_sort(names.begin(), names.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(names.size(), 3); ++i) text += (i ? ", '" : "'") + names[i].second + "'";
  return names.empty() ? "(the module has none)" : text;
}

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
    require(used[i] || hidden || plan[i].may_match_nothing, "parallelize_module",
            "no parameter or buffer is decided by entry '{}'; hint: names are fully qualified; the closest are {}", plan[i].pattern,
            closest(plan[i].pattern, tensors));
  }
  return changes;
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan) {
  for (const auto& change : changes_of(module, mesh, plan)) redistribute_(change.tensor, change.placements);
}

}  // namespace dtensor
