// The loss of a pipeline, as functions of one output or of several.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/parallel/pipeline/ranks.hpp>
#include <dtensor/parallel/pipeline/schedule.hpp>
#include <dtensor/parallel/pipeline/under_way.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <concepts>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// The loss of a microbatch, of one element, from what the last piece gives and the microbatch's target: a function of two tensors or, of a
// last piece that gives several, of a list and a tensor.
class PipelineLoss {
 public:
  using Outputs = std::vector<at::Tensor>;
  template <class Function>
  requires std::invocable<Function&, const at::Tensor&, const at::Tensor&> PipelineLoss(Function function)
      : of_([function](const Outputs& outputs, const at::Tensor& target) mutable {
          require(outputs.size() == 1, "pipeline",
                  "the last piece gives {} tensors, and the loss takes one; hint: give a function of a list of tensors and a target",
                  outputs.size());
          return function(outputs[0], target);
        }) {}
  template <class Function>
  requires(!std::invocable<Function&, const at::Tensor&, const at::Tensor&> && std::invocable<Function&, const Outputs&, const at::Tensor&>)
      PipelineLoss(Function function)
      : of_(std::move(function)) {}

  at::Tensor operator()(const Outputs& outputs, const at::Tensor& target) const { return of_(outputs, target); }

 private:
  std::function<at::Tensor(const Outputs&, const at::Tensor&)> of_;
};

namespace pipelining {

// The losses of a step, as numbers, of which ranks without the last stage have none; NaN in a dry run. Every rank of the pipeline calls it,
// and none returns where another one's step failed.
inline at::Tensor on_all_ranks(const std::vector<at::Tensor>& losses, const PipelineRanks& ranks, const Schedule& schedule) try {
  auto values = at::zeros({schedule.microbatches}, at::kDouble);
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto whole = full_tensor(losses[i]);
    values[static_cast<int64_t>(i)] = whole.is_meta() ? std::numeric_limits<double>::quiet_NaN() : whole.item<double>();
  }
  return ranks.from(schedule.rank_of_stage.back(), values);
} catch (...) {
  if (ranks.size() > 1) FailedStep::tell();
  throw;
}

}  // namespace pipelining

}  // namespace dtensor

#pragma GCC visibility pop
