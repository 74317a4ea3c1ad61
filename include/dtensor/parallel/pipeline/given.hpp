// What a runner is given: schedules, inputs and losses that it can run with.
#pragma once

#include <dtensor/parallel/pipeline/check.hpp>
#include <dtensor/parallel/pipeline/stage.hpp>

#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <string>

#pragma GCC visibility push(default)

namespace dtensor::pipelining::detail {

// What the sizes of everything between stages hang on.
inline std::string signature_of(const TensorVector& inputs) {
  std::string text = c10::GradMode::is_enabled() ? "g" : "n";
  for (const auto& x : inputs) {
    const auto* layout = find_layout(x);
    text += layout ? fmt::format(" {}{}", c10::toString(layout->dtype()), str(layout->placements())) : c10::toString(x.scalar_type());
    for (const auto size : x.sizes()) text += fmt::format(",{}", size);
  }
  return text;
}

inline at::Tensor on_mesh(const at::Tensor& tensor, const DeviceMesh& mesh) {
  return is_dtensor(tensor) ? tensor : distribute_tensor(tensor, mesh, Placements(mesh.ndim(), replicate())).tensor();
}

// That a schedule may run on so many ranks, with so many functions.
inline Schedule checked(Schedule schedule, int ranks, size_t forwards, const std::vector<Skip>& skips) {
  if (!skips.empty()) {
    schedule.edges.clear();
    for (const auto& way : ways_of(schedule, skips)) schedule.edges.push_back({way.from, way.to});
  }
  check(schedule);
  for (const auto& path : schedule.paths) {
    require(path.front() == 0 && path.back() == schedule.stages() - 1, "pipeline",
            "got the path [{}]; expected one from stage 0 to stage {}", fmt::join(path, ", "), schedule.stages() - 1);
  }
  require(static_cast<int>(schedule.ranks.size()) == ranks, "pipeline", "the schedule is for {} ranks, and the pipeline has {}",
          schedule.ranks.size(), ranks);
  require(static_cast<int>(forwards) == schedule.stages(), "pipeline", "got {} stages; expected the schedule's {}", forwards,
          schedule.stages());
  return schedule;
}

inline void check_loss(const at::Tensor& loss) {
  require(loss.defined(), "pipeline", "the loss is an undefined tensor; expected one element; hint: the function of the loss returns it");
  require(loss.numel() == 1, "pipeline", "the loss has sizes [{}]; expected one element; hint: sum() or mean() it",
          fmt::join(loss.sizes(), ", "));
  require(loss.requires_grad() || !c10::GradMode::is_enabled(), "pipeline",
          "the loss needs no gradient; hint: it must come from the last stage's outputs and parameters; evaluate() needs no gradients");
}

}  // namespace dtensor::pipelining::detail

#pragma GCC visibility pop
