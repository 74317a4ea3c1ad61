// Lets a module compute libtorch's scaled_dot_product_attention in its own way, as attention over cut sequences does, and refuse attention
// that is written out as products.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Optional.h>

#include <functional>

#pragma GCC visibility push(default)

namespace dtensor {

// The arguments of scaled_dot_product_attention.
struct AttentionArguments {
  at::Tensor q, k, v;  // [..., heads, length, dim]
  at::Tensor mask{};   // may be undefined
  double dropout = 0;
  bool causal = false;
  double scale = 0;             // of the scores; 0: 1 / sqrt(dim)
  bool asks_for_weights = false;  // of libtorch 1.13
};

// A rank's, in world.local<AttentionHook>(). It is asked before every call on the rank, plain ones too, above autograd: what it gives must
// be differentiable. Nothing: libtorch's own is called.
struct AttentionHook {
  std::function<c10::optional<at::Tensor>(const AttentionArguments&)> compute;
  // Called before every bmm(a, b) on the rank. Throws what must not be computed so.
  std::function<void(const at::Tensor& a, const at::Tensor& b)> check_product;
};

}  // namespace dtensor

#pragma GCC visibility pop
