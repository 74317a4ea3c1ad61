#include <dtensor/optim/optimizer.hpp>

#include "src/optim/param_states.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

namespace dtensor::optim {

namespace {

constexpr const char* kTag = "optim";

std::string name_of(size_t group, size_t parameter) { return fmt::format("{}.{}", group, parameter); }

}  // namespace

at::Tensor Optimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  for (const auto& group : param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto gradient = parameter.grad();
      if (!gradient.defined()) continue;
      require(gradient.layout() == at::kStrided, kTag, "a gradient is sparse; hint: make the embedding with sparse(false)");
      if (is_dtensor(gradient) && DTensor(gradient).layout().has_partial()) sync_gradients(parameter);
    }
  }
  update();
  return loss;
}

const ParamState* Optimizer::state_of(const at::Tensor& parameter) const {
  const auto it = find(state(), parameter);
  return it == state().end() ? nullptr : static_cast<const ParamState*>(it->second.get());
}

ParamState& Optimizer::state_for(const at::Tensor& parameter) {
  const auto it = find(state(), parameter);
  if (it != state().end()) return static_cast<ParamState&>(*it->second);
  auto& slot = state()[key_of<States::key_type>(parameter)];
  slot = std::make_unique<ParamState>();
  return static_cast<ParamState&>(*slot);
}

std::vector<at::Tensor> Optimizer::with_gradients(const torch::optim::OptimizerParamGroup& group) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : group.params()) {
    if (parameter.grad().defined()) parameters.push_back(parameter);
  }
  return parameters;
}

at::Tensor Optimizer::whole(const std::string&, const at::Tensor&, const at::Tensor& tensor) const {
  return full_tensor(tensor).detach().clone();
}

at::Tensor Optimizer::part(const std::string&, const at::Tensor& parameter, const at::Tensor& whole) const {
  if (!is_dtensor(parameter)) return whole;
  return distribute_tensor(whole, DTensor(parameter).mesh(), DTensor(parameter).placements()).tensor().detach().clone();
}

void Optimizer::save(torch::serialize::OutputArchive& archive) const {
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
      archive.write(name_of(g, p), saved);
    }
  }
}

void Optimizer::load(torch::serialize::InputArchive& archive) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const auto read = [](torch::serialize::InputArchive& from, const std::string& name) {
    c10::IValue value;
    from.read(name, value);
    return value;
  };
  const auto groups = read(archive, "groups").toInt();
  require(groups == static_cast<int64_t>(param_groups().size()), kTag, "the saved optimizer has {} groups of parameters; expected {}",
          groups, param_groups().size());
  for (size_t g = 0; g < param_groups().size(); ++g) {
    auto& group = param_groups()[g];
    const auto size = read(archive, fmt::format("size.{}", g)).toInt();
    require(size == static_cast<int64_t>(group.params().size()), kTag, "group {} of the saved optimizer has {} parameters; expected {}", g,
            size, group.params().size());
  }
  for (size_t g = 0; g < param_groups().size(); ++g) {
    auto& group = param_groups()[g];
    torch::serialize::InputArchive options;
    archive.read(fmt::format("options.{}", g), options);
    group.options().serialize(options);
    for (size_t p = 0; p < group.params().size(); ++p) {
      torch::serialize::InputArchive saved;
      archive.read(name_of(g, p), saved);
      const auto step = read(saved, "step").toInt();
      if (step < 0) {
        if (const auto it = find(state(), group.params()[p]); it != state().end()) state().erase(it);
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
