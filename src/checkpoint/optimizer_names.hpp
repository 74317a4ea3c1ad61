// What the state of a parameter is called in a checkpoint, and what an optimizer's names tell of it.
#pragma once

#include <dtensor/checkpoint/state.hpp>

#include <map>
#include <string>

namespace dtensor::checkpoints {

// "optimizer.state.model.layer.weight."; "optimizer.state.#0.3." for a parameter of no module.
std::string state_prefix(const std::string& optimizer, const TensorNames& names, const at::Tensor& parameter, size_t group,
                         size_t position);

// For each optimizer of the state that has other options than it was saved with, so that it was another optimizer: what to say of it.
std::map<std::string, std::string> other_optimizers(const std::map<std::string, Value>& wanted, const std::map<std::string, Value>& saved);

}  // namespace dtensor::checkpoints
