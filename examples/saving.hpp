// Writes a model and AdamW's state as files of one device, and reads them on any mesh. To be copied into a program. Every rank calls these, in
// or out of dt::Spmd; `writes` is true on one of them. A rank holds all of it, whole, for a moment.
#pragma once

#include <dtensor/spmd.hpp>
#include <dtensor/tensor.hpp>

#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

// All that a model holds: parameters, then buffers.
inline std::vector<at::Tensor> tensors_of(const torch::nn::Module& model) {
  auto tensors = model.parameters();
  for (const auto& buffer : model.buffers()) tensors.push_back(buffer);
  return tensors;
}

inline void save_model(const torch::nn::Module& model, const std::string& path, bool writes) {
  at::NoGradGuard no_grad;
  dtensor::NoSpmd plain;
  std::vector<at::Tensor> whole;
  for (const auto& tensor : tensors_of(model)) whole.push_back(dtensor::full_tensor(tensor).clone());
  if (writes) torch::save(whole, path);
}

// `tensor`, which every rank has whole, as `like` lies.
inline at::Tensor laid_out_like(const at::Tensor& like, const at::Tensor& tensor) {
  if (!dtensor::is_dtensor(like)) return tensor;
  const dtensor::DTensor known(like);
  return dtensor::distribute_tensor(tensor, known.mesh(), known.placements())->clone();
}

inline void load_model(const torch::nn::Module& model, const std::string& path) {
  at::NoGradGuard no_grad;
  dtensor::NoSpmd plain;
  std::vector<at::Tensor> whole;
  torch::load(whole, path);
  const auto tensors = tensors_of(model);
  TORCH_CHECK(whole.size() == tensors.size(), path, " has ", whole.size(), " tensors; expected those of the model, ", tensors.size());
  for (size_t i = 0; i < whole.size(); ++i) tensors[i].copy_(laid_out_like(tensors[i], whole[i]));
}

// What an optimizer remembers of a parameter is found by the parameter's address, which is a text in libtorch 1.13.
template <class States>
auto find_state(States& states, const at::Tensor& parameter) {
  if constexpr (std::is_same_v<typename States::key_type, std::string>) {
    std::ostringstream address;
    address << parameter.unsafeGetTensorImpl();
    return states.find(address.str());
  } else {
    return states.find(parameter.unsafeGetTensorImpl());
  }
}

// Puts change(parameter, tensor) in the place of each tensor that AdamW remembers.
template <class Change>
void change_states(torch::optim::AdamW& optimizer, const Change& change) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto found = find_state(optimizer.state(), parameter);
      if (found == optimizer.state().end()) continue;
      auto& state = static_cast<torch::optim::AdamWParamState&>(*found->second);
      state.exp_avg(change(parameter, state.exp_avg()));
      state.exp_avg_sq(change(parameter, state.exp_avg_sq()));
      if (state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(change(parameter, state.max_exp_avg_sq()));
    }
  }
}

inline void save_optimizer(torch::optim::AdamW& optimizer, const std::string& path, bool writes) {
  at::NoGradGuard no_grad;
  dtensor::NoSpmd plain;
  change_states(optimizer, [](const at::Tensor&, const at::Tensor& state) { return dtensor::full_tensor(state).clone(); });
  if (writes) torch::save(optimizer, path);
  change_states(optimizer, laid_out_like);
}

inline void load_optimizer(torch::optim::AdamW& optimizer, const std::string& path) {
  at::NoGradGuard no_grad;
  dtensor::NoSpmd plain;
  torch::load(optimizer, path);
  change_states(optimizer, laid_out_like);
}
