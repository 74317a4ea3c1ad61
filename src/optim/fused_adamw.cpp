#include <dtensor/optim/fused_adamw.hpp>

#include <dtensor/base/compat.hpp>
#include <dtensor/optim/param_states.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/spread.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#if DTENSOR_TORCH_AT_LEAST(2, 4)
#include <ATen/ops/_fused_adamw.h>
#endif

#include <algorithm>

namespace dtensor::optim {

#if DTENSOR_TORCH_AT_LEAST(2, 4)

namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

bool is_alike(const at::Tensor& parameter, const at::Tensor& like) {
  const auto& gradient = parameter.grad();
  return !gradient.is_sparse() && find_layout(parameter) == find_layout(gradient) && gradient.scalar_type() == like.scalar_type() &&
         parameter.scalar_type() == like.scalar_type() && parameter.device() == like.device();
}

AdamWParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = optimizer.state()[detail::key_of<detail::States::key_type>(parameter)];
  if (!state) {
    auto made = std::make_unique<AdamWParamState>();
    made->exp_avg(at::zeros_like(parameter)).exp_avg_sq(at::zeros_like(parameter));
    state = std::move(made);
  }
  return static_cast<AdamWParamState&>(*state);
}

// Of a group's parameters that have a gradient.
std::vector<at::Tensor> with_gradients(const torch::optim::OptimizerParamGroup& group) {
  std::vector<at::Tensor> chosen;
  std::ranges::copy_if(group.params(), std::back_inserter(chosen), [](const at::Tensor& p) { return p.grad().defined(); });
  return chosen;
}

bool can_fuse(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, const AdamWOptions& options) {
  if (options.amsgrad()) return false;
  return std::ranges::all_of(parameters, [&](const at::Tensor& p) {
    return is_alike(p, parameters[0]) && state_of(optimizer, p).step() == state_of(optimizer, parameters[0]).step();
  });
}

void step_fused(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, const AdamWOptions& options) {
  std::vector<at::Tensor> own, gradients, averages, squares;
  for (const auto& parameter : parameters) {
    auto& state = state_of(optimizer, parameter);
    state.step(state.step() + 1);
    const auto local = dtensor::detail::plain_local(parameter);
    if (local.numel() == 0) continue;
    own.push_back(local);
    gradients.push_back(dtensor::detail::plain_local(parameter.grad()));
    averages.push_back(dtensor::detail::plain_local(state.exp_avg()));
    squares.push_back(dtensor::detail::plain_local(state.exp_avg_sq()));
    parameter.unsafeGetTensorImpl()->bump_version();
  }
  if (own.empty()) return;
  const NoSpmd plain;
  const auto step = at::full({}, static_cast<double>(state_of(optimizer, parameters[0]).step()), own[0].options().dtype(at::kFloat));
  const std::vector<at::Tensor> steps(own.size(), step);
  const auto [first, second] = options.betas();
  at::_fused_adamw_(own, gradients, averages, squares, {}, steps, options.lr(), first, second, options.weight_decay(), options.eps(),
                    /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace

at::Tensor FusedAdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  std::vector<std::pair<std::vector<at::Tensor>, const AdamWOptions*>> groups;
  for (const auto& group : param_groups()) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    auto parameters = with_gradients(group);
    if (parameters.empty()) continue;
    if (!can_fuse(*this, parameters, options)) {
      AdamW::step();
      return loss;
    }
    groups.emplace_back(std::move(parameters), &options);
  }
  for (const auto& [parameters, options] : groups) step_fused(*this, parameters, *options);
  return loss;
}

#else

at::Tensor FusedAdamW::step(LossClosure closure) { return AdamW::step(std::move(closure)); }

#endif

}  // namespace dtensor::optim
