#include <dtensor/gradients/leaf_hooks.hpp>

#include "src/dispatch/key.hpp"
#include "src/gradients/add_hook.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>

#include <string>
#include <utility>

namespace dtensor {

namespace {

using torch::autograd::variable_list;

void check_is_leaf(std::string_view tag, const at::Tensor& leaf) {
  require(leaf.defined() && leaf.is_leaf() && leaf.requires_grad(), tag, "expected a leaf that requires a gradient; got {}",
          !leaf.defined()  ? "an undefined tensor"
          : leaf.is_leaf() ? "a tensor without a gradient"
                           : "the result of an operator");
}

std::string text_of(const at::Tensor& tensor) {
  const auto* layout = find_layout(tensor);
  return layout ? layout->str() : fmt::format("a plain tensor of sizes [{}]", fmt::join(tensor.sizes(), ", "));
}

struct BeforeAdded final : torch::autograd::FunctionPreHook {
  explicit BeforeAdded(std::function<at::Tensor(const at::Tensor&)> f) : hook(std::move(f)) {}
  variable_list operator()(const variable_list& gradients) override {
    if (!gradients[0].defined()) return gradients;
    const auto other = hook(gradients[0]);
    if (!other.defined()) return gradients;
    require(other.sizes() == gradients[0].sizes() && find_layout(other) == find_layout(gradients[0]), "add_gradient_hook",
            "the hook returned {}; expected {}, as the gradient is; hint: return an undefined tensor to keep the gradient", text_of(other),
            text_of(gradients[0]));
    return {other};
  }
  const std::function<at::Tensor(const at::Tensor&)> hook;
};

struct AfterAdded final : torch::autograd::FunctionPostHook {
  AfterAdded(const at::Tensor& l, std::function<void(const at::Tensor&)> f) : leaf(l.getIntrusivePtr()), hook(std::move(f)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (auto alive = leaf.lock()) hook(at::Tensor(std::move(alive)));
    return outputs;
  }
  const c10::weak_intrusive_ptr<c10::TensorImpl> leaf;  // whose accumulator has this
  const std::function<void(const at::Tensor&)> hook;
};

}  // namespace

void add_gradient_hook(const at::Tensor& leaf, std::function<at::Tensor(const at::Tensor&)> hook) {
  check_is_leaf("add_gradient_hook", leaf);
  require(hook != nullptr, "add_gradient_hook", "the hook is empty");
  auto* impl = as_dtensor(leaf);
  if (impl && !impl->leaf_checked) dispatch::check_leaf(impl);  // which moves the gradient to the leaf's layout, before this hook
  add_last_hook(leaf, std::make_unique<BeforeAdded>(std::move(hook)));
}

std::shared_ptr<void> after_gradient(const at::Tensor& leaf, std::function<void(const at::Tensor&)> hook) {
  check_is_leaf("after_gradient", leaf);
  require(hook != nullptr, "after_gradient", "the hook is empty");
  auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  const auto key = accumulator->add_post_hook(std::make_unique<AfterAdded>(leaf, std::move(hook)));
  return {accumulator.get(), [accumulator, key](void*) { accumulator->del_post_hook(key); }};
}

}  // namespace dtensor
