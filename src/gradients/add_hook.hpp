// A hook of a tensor that runs after all that register_hook adds, also later.
#pragma once

#include <dtensor/base/compat.hpp>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace dtensor {

// Hooks of register_hook are one list, which is in its place among the others as soon as it is there.
inline void add_last_hook(const at::Tensor& tensor, std::unique_ptr<torch::autograd::FunctionPreHook> hook) {
  tensor.remove_hook(tensor.register_hook([](const at::Tensor&) {}));
#if DTENSOR_TORCH_AT_LEAST(2, 0)
  torch::autograd::impl::hooks(tensor).push_back(std::move(hook));  // add_hook is for a first one
#else
  torch::autograd::impl::add_hook(tensor, std::shared_ptr<torch::autograd::FunctionPreHook>(std::move(hook)));
#endif
}

}  // namespace dtensor
