// Files of optimizers. The archive is the one that the optimizer's own save() writes, while the tensors of its states are replaced by whole
// ones.
#include "src/checkpoint/archives.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/torch_files.hpp>
#include <dtensor/optim/optimizer.hpp>
#include <dtensor/optim/param_states.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>
#include <dtensor/training/parameters_of.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <fmt/ranges.h>
#include <range/v3/view/zip.hpp>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <typeinfo>
#include <utility>

namespace dtensor::files {

namespace {

using torch::optim::LBFGSParamState;
using torch::optim::OptimizerParamState;

// LBFGS keeps vectors over all parameters, in the state of the first parameter.
std::vector<at::Tensor*> tensors_of(LBFGSParamState& state) {
  std::vector<at::Tensor*> all{&state.d(), &state.H_diag(), &state.prev_flat_grad()};
  const auto add = [&](auto& tensors) {
    for (auto& tensor : tensors) all.push_back(&tensor);
  };
  add(state.old_dirs());
  add(state.old_stps());
  add(state.ro());
  if (state.al()) add(*state.al());
  return all;
}

// While the history of LBFGS is not full, it has undefined tensors, which libtorch cannot write ("Cannot access storage of
// UndefinedTensorImpl"). LBFGS writes each of them before it reads it, so any number will do in the file.
void fill_history(const torch::optim::Optimizer& optimizer) {
  for (const auto& [key, state] : optimizer.state()) {
    auto* lbfgs = dynamic_cast<LBFGSParamState*>(state.get());
    if (!lbfgs || !lbfgs->al()) continue;
    for (auto& number : *lbfgs->al()) {
      if (!number.defined()) number = at::zeros({}, lbfgs->H_diag().scalar_type());
    }
  }
}

// The tensors of a state of one of libtorch's optimizers, those that are defined. Throws for a state of another type.
std::vector<at::Tensor*> tensors_of(OptimizerParamState& state) {
  std::vector<at::Tensor*> all;
  if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) all = {&sgd->momentum_buffer()};
  else if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&state))
    all = {&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()};
  else if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state))
    all = {&adamw->exp_avg(), &adamw->exp_avg_sq(), &adamw->max_exp_avg_sq()};
  else if (auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) all = {&adagrad->sum()};
  else if (auto* rms = dynamic_cast<torch::optim::RMSpropParamState*>(&state))
    all = {&rms->square_avg(), &rms->momentum_buffer(), &rms->grad_avg()};
  else if (auto* lbfgs = dynamic_cast<LBFGSParamState*>(&state)) all = tensors_of(*lbfgs);
  else
    throw std::runtime_error(
        fmt::format("the optimizer remembers a {}, whose tensors are not known; hint: derive the optimizer from "
                    "dtensor::optim::Optimizer, or make its state whole with dtensor::full_tensor and torch::save it",
                    c10::demangle(typeid(state).name())));
  std::erase_if(all, [](const at::Tensor* tensor) { return !tensor->defined(); });
  return all;
}

// Calls change(parameter, tensor) for each tensor of the optimizer's states, in the order of the parameters.
template <class Change>
void for_each_tensor(const std::vector<at::Tensor>& parameters, optim::detail::States& states, const Change& change) {
  for (const auto& parameter : parameters) {
    const auto found = optim::detail::find(states, parameter);
    if (found == states.end()) continue;
    for (auto* tensor : tensors_of(*found->second)) change(parameter, *tensor);
  }
}

// Whether the optimizer's own save() and load() write plain tensors on every rank.
bool saves_itself(const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  return dynamic_cast<const optim::Optimizer*>(&optimizer) || std::ranges::none_of(parameters, is_dtensor);
}

// Gives the optimizer other states until it ends.
class WithStates {
 public:
  WithStates(torch::optim::Optimizer& optimizer, optim::detail::States& states) : optimizer_(optimizer), states_(states) {
    std::swap(optimizer_.state(), states_);
  }
  ~WithStates() { std::swap(optimizer_.state(), states_); }
  WithStates(const WithStates&) = delete;
  WithStates& operator=(const WithStates&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  optim::detail::States& states_;
};

// Throws for a tensor that has neither the sizes of its parameter nor, of LBFGS, is a vector over all parameters or a number.
void check_sizes(const std::vector<at::Tensor>& parameters, optim::detail::States& states, const std::string& path) {
  int64_t elements = 0;
  for (const auto& parameter : parameters) elements += parameter.numel();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = optim::detail::find(states, parameters[i]);
    if (found == states.end()) continue;
    const bool is_flat = dynamic_cast<LBFGSParamState*>(found->second.get());
    for (const auto* tensor : tensors_of(*found->second)) {
      if (is_flat ? tensor->numel() == elements || tensor->numel() == 1 : tensor->sizes() == parameters[i].sizes()) continue;
      const auto expected = is_flat ? std::to_string(elements) : fmt::format("{}", fmt::join(parameters[i].sizes(), ", "));
      throw std::runtime_error(
          fmt::format("'{}' does not fit the optimizer: what it remembers of parameter {} has sizes [{}], expected [{}]", path, i,
                      fmt::join(tensor->sizes(), ", "), expected));
    }
  }
}

// What the first rank has read and sends to the others: the file, with tensors of the same sizes that take no memory, and the tensors.
struct Told {
  std::string skeleton;
  std::vector<at::Tensor> tensors;
};

Told take_tensors(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  Told told;
  for_each_tensor(parameters, optimizer.state(), [&](const at::Tensor&, at::Tensor& tensor) {
    told.tensors.push_back(tensor.contiguous());
    tensor = at::zeros({}, tensor.scalar_type()).expand(tensor.sizes());
  });
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(out);
  told.skeleton = out.str();
  return told;
}

// Undoes what an optimizer's load() changed, unless keep() is called.
class Undo {
 public:
  explicit Undo(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    std::swap(optimizer_.state(), states_);
    for (const auto& group : optimizer_.param_groups()) options_.push_back(group.options().clone());
  }
  ~Undo() {
    if (kept_) return;
    std::swap(optimizer_.state(), states_);
    for (auto&& [group, options] : ranges::views::zip(optimizer_.param_groups(), options_)) group.set_options(std::move(options));
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;

  // Keeps states of which nothing was loaded.
  void keep() {
    for (auto& [key, state] : states_) {
      auto& now = optimizer_.state()[key];
      if (!now) now = std::move(state);
    }
    kept_ = true;
  }

 private:
  torch::optim::Optimizer& optimizer_;
  optim::detail::States states_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
  bool kept_ = false;
};

}  // namespace

}  // namespace dtensor::files

namespace dtensor::detail {

using namespace dtensor::files;

void save_optimizer(const torch::optim::Optimizer& optimizer, const std::string& path) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const auto parameters = parameters_of(optimizer);
  const Ranks ranks("save", parameters);
  fill_history(optimizer);
  torch::serialize::OutputArchive archive;
  if (saves_itself(optimizer, parameters)) {
    optimizer.save(archive);
    return ranks.first_does([&] { write_file(archive, path); });
  }
  Wholes wholes(ranks);
  optim::detail::States states;
  for (const auto& [key, state] : optimizer.state()) states[key] = state->clone();
  ranks.first_does([&] { for_each_tensor(parameters, states, [](const auto&, auto&) {}); });  // every type is known
  for_each_tensor(parameters, states, [&](const at::Tensor&, at::Tensor& tensor) { tensor = wholes.of(tensor); });
  ranks.first_does([&] {
    {
      const WithStates whole(const_cast<torch::optim::Optimizer&>(optimizer), states);  // as it was, when this ends
      optimizer.save(archive);
    }
    write_file(archive, path);
  });
}

// libtorch reads what its optimizers of this type write, and says little about anything else.
static void load_state(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive, const std::string& path) {
  try {
    optimizer.load(archive);
  } catch (const std::exception& problem) {
    const std::string text = problem.what();
    const auto parameters = dtensor::detail::parameters_of(optimizer).size();
    fail("load",
         "'{}' is not the state of such an optimizer: it is another's, of other parameters, or a model's; expected what dt::save wrote of "
         "one of the same type with {} parameters in {} groups; hint: save and load optimizers and models of the same kind; libtorch says: "
         "{}",
         path, parameters, optimizer.param_groups().size(), text.substr(0, text.find('\n')));
  }
}

void load_optimizer(torch::optim::Optimizer& optimizer, const std::string& path) {
  const auto parameters = parameters_of(optimizer);
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Ranks ranks("load", parameters);
  if (saves_itself(optimizer, parameters)) {
    auto archive = read_file_on_all(ranks, path);
    return load_state(optimizer, archive, path);
  }
  Undo undo(optimizer);
  Told told;
  ranks.first_does([&] {
    auto archive = read_file(path);
    load_state(optimizer, archive, path);
    check_sizes(parameters, optimizer.state(), path);
    told = take_tensors(optimizer, parameters);
  });
  const auto skeleton = ranks.from_first(told.skeleton);
  if (!ranks.is_first()) {
    torch::serialize::InputArchive archive;
    archive.load_from(skeleton.data(), skeleton.size());
    optimizer.load(archive);
  }
  size_t next = 0;
  for_each_tensor(parameters, optimizer.state(), [&](const at::Tensor& parameter, at::Tensor& tensor) {
    const auto whole =
        ranks.from_first(ranks.is_first() ? std::exchange(told.tensors[next++], {}) : at::empty(tensor.sizes(), tensor.scalar_type()));
    if (is_dtensor(parameter) && tensor.sizes() != parameter.sizes()) {
      const auto& mesh = DTensor(parameter).mesh();
      tensor = distribute_tensor(whole.to(parameter.device()), mesh, Placements(static_cast<size_t>(mesh.ndim()), replicate()));
    } else {
      tensor = laid_out_like(parameter, whole).clone();
    }
  });
  undo.keep();
}

}  // namespace dtensor::detail
