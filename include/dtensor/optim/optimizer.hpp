// What the optimizers of this folder share: named state, and saving it whatever its layout.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/optim/param_states.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::optim {

// What an optimizer remembers of a parameter: how many steps it has made, and named tensors. These are laid out as the parameter, unless
// the optimizer says otherwise.
struct ParamState : torch::optim::OptimizerCloneableParamState<ParamState> {
  int64_t step = 0;
  std::map<std::string, at::Tensor> tensors;
};

class Optimizer : public torch::optim::Optimizer {
 public:
  using torch::optim::Optimizer::Optimizer;

  // Makes one step for all parameters that have a gradient; reduces Partial gradients first. If there is a closure, calls it first and
  // returns its loss.
  at::Tensor step(LossClosure closure = nullptr) final;

  // Null before the parameter's first step.
  const ParamState* state_of(const at::Tensor& parameter) const;

  // Save and load options and state as whole tensors, so that what was saved on one mesh loads on another. Every rank calls them; save()
  // gathers the state.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Make a whole, plain tensor of a tensor of the state, and back. For who saves it; all ranks of the parameter's mesh call them.
  virtual at::Tensor whole(const std::string& name, const at::Tensor& parameter, const at::Tensor& tensor) const;
  virtual at::Tensor part(const std::string& name, const at::Tensor& parameter, const at::Tensor& whole) const;

 protected:
  virtual void update() = 0;

  ParamState& state_for(const at::Tensor& parameter);

  // The group's parameters that have a gradient.
  static std::vector<at::Tensor> with_gradients(const torch::optim::OptimizerParamGroup& group);
};

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kOptim = "optim";

inline std::string name_of(size_t group, size_t parameter) { return fmt::format("{}.{}", group, parameter); }

}  // namespace detail

inline at::Tensor Optimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  for (const auto& group : param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      require(gradient.layout() == at::kStrided, detail::kOptim, "a gradient is sparse; hint: make the embedding with sparse(false)");
      if (is_dtensor(gradient) && DTensor(gradient).layout().has_partial()) sync_gradients(parameter);
    }
  }
  update();
  return loss;
}

inline const ParamState* Optimizer::state_of(const at::Tensor& parameter) const {
  const auto it = detail::find(state(), parameter);
  return it == state().end() ? nullptr : static_cast<const ParamState*>(it->second.get());
}

inline ParamState& Optimizer::state_for(const at::Tensor& parameter) {
  const auto it = detail::find(state(), parameter);
  if (it != state().end()) return static_cast<ParamState&>(*it->second);
  auto& slot = state()[detail::key_of<detail::States::key_type>(parameter)];
  slot = std::make_unique<ParamState>();
  return static_cast<ParamState&>(*slot);
}

inline std::vector<at::Tensor> Optimizer::with_gradients(const torch::optim::OptimizerParamGroup& group) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : group.params()) {
    if (parameter.grad().defined()) parameters.push_back(parameter);
  }
  return parameters;
}

inline at::Tensor Optimizer::whole(const std::string&, const at::Tensor&, const at::Tensor& tensor) const {
  return full_tensor(tensor).detach().clone();
}

inline at::Tensor Optimizer::part(const std::string&, const at::Tensor& parameter, const at::Tensor& whole) const {
  if (!is_dtensor(parameter)) return whole;
  return distribute_tensor(whole, DTensor(parameter).mesh(), DTensor(parameter).placements()).tensor().detach().clone();
}

inline void Optimizer::save(torch::serialize::OutputArchive& archive) const {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  archive.write("groups", c10::IValue(static_cast<int64_t>(param_groups().size())));
  for (size_t g = 0; g < param_groups().size(); ++g) {
    const auto& group = param_groups()[g];
    torch::serialize::OutputArchive options(archive.compilation_unit());
    group.options().serialize(options);
    archive.write(fmt::format("options.{}", g), options);
    archive.write(fmt::format("size.{}", g), c10::IValue(static_cast<int64_t>(group.params().size())));
    for (size_t p = 0; p < group.params().size(); ++p) {
      const auto& parameter = group.params()[p];
      const auto* remembered = state_of(parameter);
      torch::serialize::OutputArchive saved(archive.compilation_unit());
      saved.write("step", c10::IValue(remembered ? remembered->step : int64_t{-1}));
      c10::List<std::string> names;
      for (const auto& [name, tensor] : remembered ? remembered->tensors : std::map<std::string, at::Tensor>()) {
        names.push_back(name);
        saved.write("tensor." + name, whole(name, parameter, tensor));
      }
      saved.write("names", c10::IValue(names));
      archive.write(detail::name_of(g, p), saved);
    }
  }
}

inline void Optimizer::load(torch::serialize::InputArchive& archive) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const auto read = [](torch::serialize::InputArchive& from, const std::string& name) {
    c10::IValue value;
    from.read(name, value);
    return value;
  };
  const auto groups = read(archive, "groups").toInt();
  require(groups == static_cast<int64_t>(param_groups().size()), detail::kOptim,
          "the saved optimizer has {} groups of parameters; expected {}", groups, param_groups().size());
  for (size_t g = 0; g < param_groups().size(); ++g) {
    auto& group = param_groups()[g];
    const auto size = read(archive, fmt::format("size.{}", g)).toInt();
    require(size == static_cast<int64_t>(group.params().size()), detail::kOptim,
            "group {} of the saved optimizer has {} parameters; expected {}", g, size, group.params().size());
  }
  for (size_t g = 0; g < param_groups().size(); ++g) {
    auto& group = param_groups()[g];
    torch::serialize::InputArchive options;
    archive.read(fmt::format("options.{}", g), options);
    group.options().serialize(options);
    for (size_t p = 0; p < group.params().size(); ++p) {
      torch::serialize::InputArchive saved;
      archive.read(detail::name_of(g, p), saved);
      const auto step = read(saved, "step").toInt();
      if (step < 0) {
        if (const auto it = detail::find(state(), group.params()[p]); it != state().end()) state().erase(it);
        continue;
      }
      auto& remembered = state_for(group.params()[p]);
      remembered.step = step;
      remembered.tensors.clear();
      for (const auto& name : read(saved, "names").toListRef()) {
        at::Tensor tensor;
        saved.read("tensor." + name.toStringRef(), tensor);
        remembered.tensors[name.toStringRef()] = part(name.toStringRef(), group.params()[p], tensor);
      }
    }
  }
}

}  // namespace dtensor::optim

#pragma GCC visibility pop
