// The loss of a pipeline, as functions of one output or of several.
#pragma once

#include <dtensor/base/error.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
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

}  // namespace dtensor

#pragma GCC visibility pop
