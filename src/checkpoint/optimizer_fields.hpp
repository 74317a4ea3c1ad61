// What libtorch's optimizers remember of a parameter, by name.
#pragma once

#include <dtensor/optim/optimizer.hpp>

#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>

namespace dtensor::checkpoints {

// One overload a type of state: calls field(name, value) for each tensor and number that it has, as references.
template <class Field>
void fields_of(torch::optim::SGDParamState& state, const Field& field) {
  field("momentum_buffer", state.momentum_buffer());
}

template <class State, class Field>
void fields_of_adam(State& state, const Field& field) {
  field("step", state.step());
  field("exp_avg", state.exp_avg());
  field("exp_avg_sq", state.exp_avg_sq());
  field("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Field>
void fields_of(torch::optim::AdamParamState& state, const Field& field) {
  fields_of_adam(state, field);
}
template <class Field>
void fields_of(torch::optim::AdamWParamState& state, const Field& field) {
  fields_of_adam(state, field);
}

template <class Field>
void fields_of(torch::optim::AdagradParamState& state, const Field& field) {
  field("step", state.step());
  field("sum", state.sum());
}

template <class Field>
void fields_of(torch::optim::RMSpropParamState& state, const Field& field) {
  field("step", state.step());
  field("square_avg", state.square_avg());
  field("momentum_buffer", state.momentum_buffer());
  field("grad_avg", state.grad_avg());
}

// Of LBFGS, which keeps vectors over all parameters in the state of the first one. Lists of tensors: field(name, list).
template <class Field>
void fields_of(torch::optim::LBFGSParamState& state, const Field& field) {
  field("func_evals", state.func_evals());
  field("n_iter", state.n_iter());
  field("t", state.t());
  field("prev_loss", state.prev_loss());
  field("d", state.d());
  field("H_diag", state.H_diag());
  field("prev_flat_grad", state.prev_flat_grad());
  field("old_dirs", state.old_dirs());
  field("old_stps", state.old_stps());
  field("ro", state.ro());
}

// Of our own optimizers: the tensors that there are.
template <class Field>
void fields_of(optim::ParamState& state, const Field& field) {
  field("step", state.step);
  for (auto& [name, tensor] : state.tensors) field(name, tensor);
}

// Whether an optimizer may remember the others without this one.
inline bool is_optional(const std::string& field) {
  constexpr const char* kOptional[] = {"max_exp_avg_sq", "momentum_buffer", "grad_avg", "d", "H_diag", "prev_flat_grad"};
  return std::ranges::find(kOptional, field) != std::end(kOptional);
}

// Calls fn(state) with the state as what it is. Returns whether its type is known.
template <class Fn>
bool with_type(torch::optim::OptimizerParamState& state, const Fn& fn) {
  const auto is = [&]<class State>(State*) {
    auto* typed = dynamic_cast<State*>(&state);
    if (typed) fn(*typed);
    return typed != nullptr;
  };
  return is(static_cast<torch::optim::AdamWParamState*>(nullptr)) || is(static_cast<torch::optim::AdamParamState*>(nullptr)) ||
         is(static_cast<torch::optim::SGDParamState*>(nullptr)) || is(static_cast<optim::ParamState*>(nullptr)) ||
         is(static_cast<torch::optim::RMSpropParamState*>(nullptr)) || is(static_cast<torch::optim::AdagradParamState*>(nullptr)) ||
         is(static_cast<torch::optim::LBFGSParamState*>(nullptr));
}

// An empty state of the kind that the optimizer keeps; null: the kind is not known.
inline std::unique_ptr<torch::optim::OptimizerParamState> new_state_of(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return std::make_unique<torch::optim::AdamWParamState>();
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return std::make_unique<torch::optim::AdamParamState>();
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return std::make_unique<torch::optim::SGDParamState>();
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer)) return std::make_unique<torch::optim::RMSpropParamState>();
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer)) return std::make_unique<torch::optim::AdagradParamState>();
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer)) return std::make_unique<torch::optim::LBFGSParamState>();
  if (dynamic_cast<const optim::Optimizer*>(&optimizer)) return std::make_unique<optim::ParamState>();
  return nullptr;
}

}  // namespace dtensor::checkpoints
