// What the optimizers of this folder share: named state, and saving it whatever its layout.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

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

 protected:
  virtual void update() = 0;

  ParamState& state_for(const at::Tensor& parameter);

  // The group's parameters that have a gradient.
  static std::vector<at::Tensor> with_gradients(const torch::optim::OptimizerParamGroup& group);

  // Make a whole, plain tensor of a tensor of the state, and back.
  virtual at::Tensor whole(const std::string& name, const at::Tensor& parameter, const at::Tensor& tensor) const;
  virtual at::Tensor part(const std::string& name, const at::Tensor& parameter, const at::Tensor& whole) const;
};

}  // namespace dtensor::optim
