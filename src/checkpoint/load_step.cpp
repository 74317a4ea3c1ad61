// Steps in folders: which there are, and loading one.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/load.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

namespace dtensor {

using namespace checkpoints;

namespace {

const char* why_no_step(const std::string& folder) {
  if (!disk::exists(folder)) return "there is no such folder";
  if (disk::exists(folder + "/" + kIndexName)) return "it is a step itself; name the folder that it lies in, and its number";
  return "a step is complete when its folder, step-N, has an index.json";
}

// The text of the index of a step, as the first rank reads it.
std::string read_index_text(const std::string& folder, int64_t& step, bool any) {
  const auto steps = complete_steps(folder);
  if (!any && std::ranges::find(steps, step) == steps.end()) {
    std::vector<int64_t> near = steps;
    std::ranges::sort(near, {}, [&](int64_t other) { return std::abs(other - step); });
    if (near.size() > 3) near.resize(3);
    fail(kLoad, "'{}' has no complete step {}; {}", folder, step,
         near.empty() ? "it has none" : fmt::format("closest: {}", fmt::join(near, ", ")));
  }
  require(!steps.empty(), kLoad, "'{}' has no complete step of a checkpoint; hint: {}", folder, why_no_step(folder));
  if (any) step = steps.back();
  const auto path = step_folder(folder, step) + "/" + kIndexName;
  auto text = disk::read_text(path);
  const auto index = index_from(text, path);
  require(index.step == step, kLoad, "'{}' says that it is step {}; expected {}; hint: was the folder renamed?", path, index.step, step);
  return text;
}

}  // namespace

std::string step_folder(const std::string& folder, int64_t step) {
  require(!folder.empty(), "step_folder", "{}", kNoFolder);
  return fmt::format("{}/step-{}", folder, step);
}

std::vector<int64_t> complete_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  if (!disk::exists(folder)) return steps;
  for (const auto& name : disk::names_in(folder)) {
    const auto step = step_of(name);
    if (step && disk::exists(fmt::format("{}/{}/{}", folder, name, kIndexName))) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

std::optional<int64_t> last_step(const std::string& folder) {
  const auto steps = complete_steps(folder);
  if (steps.empty()) return {};
  return steps.back();
}

void load(const State& state, const Index& index, const LoadOptions& options) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Everyone everyone(kLoad);
  const auto own = fingerprint(to_text(index))[0];
  const auto told = everyone.gather_numbers({own});
  const bool is_other = std::ranges::any_of(told, [&](const auto& numbers) { return numbers[0] != own; });
  everyone.agree(
      is_other ? fmt::format("ranks have read other indexes; this one's is of '{}'; hint: all read the same files", index.folder) : "");
  checkpoints::load(state, index, options, everyone);
}

int64_t load(const State& state, const std::string& folder, std::optional<int64_t> wanted, const LoadOptions& options) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Everyone everyone(kLoad);
  const auto where = fingerprint(fmt::format("{}\n{}", folder, wanted.value_or(-1)))[0];
  std::string problem;
  for (const auto& numbers : everyone.gather_numbers({where})) {
    if (numbers[0] != where)
      problem =
          fmt::format("ranks name different folders or steps; this one: '{}'{}", folder, wanted ? fmt::format(", step {}", *wanted) : "");
  }
  if (folder.empty()) problem = kNoFolder;
  everyone.agree(problem);
  int64_t step = wanted.value_or(0);
  std::string text;
  if (everyone.is_first()) problem = problem_of([&] { text = read_index_text(folder, step, !wanted); });
  everyone.agree(problem);
  text = everyone.from_first(text);
  Index index;
  everyone.agree(problem_of([&] { index = index_from(text, folder); }));
  index.folder = step_folder(folder, index.step);
  checkpoints::load(state, index, options, everyone);
  return index.step;
}

}  // namespace dtensor
