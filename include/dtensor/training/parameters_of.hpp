// The parameters of an optimizer, of all its groups.
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::detail {

// In the order of the groups and of the parameters in each.
inline std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

}  // namespace dtensor::detail

#pragma GCC visibility pop
