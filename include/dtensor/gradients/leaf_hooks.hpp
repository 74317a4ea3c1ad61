// Hooks of leaves: what is to happen to a parameter's gradient, and when it has come.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#pragma GCC visibility push(default)

namespace dtensor {

// Runs `hook` each time that a backward pass brings `leaf` a gradient, before that is added to leaf.grad(): after all that register_hook
// adds, and, of a DTensor, with the gradient in the leaf's layout (reading one that is under way waits for it). What the hook returns is
// added instead, of the same sizes and layout; an undefined tensor leaves the gradient as it is. Several run in the order in which they
// were added; they stay as long as the leaf. Communicates nothing itself. Throws for what is no leaf that requires a gradient.
void add_gradient_hook(const at::Tensor& leaf, std::function<at::Tensor(const at::Tensor& gradient)> hook);

// Runs `hook` each time that a backward pass has added to leaf.grad(), with the leaf: where an optimizer may step, or a buffer be sent off,
// while the backward pass goes on. Of a leaf that is used several times it runs once in a pass, when all has been added. It is removed when
// the handle goes, which keeps the leaf. Throws as add_gradient_hook does.
[[nodiscard]] std::shared_ptr<void> after_gradient(const at::Tensor& leaf, std::function<void(const at::Tensor& leaf)> hook);

}  // namespace dtensor

#pragma GCC visibility pop
