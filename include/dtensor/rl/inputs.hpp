// What the algorithms ask of their tensors, masks, and numbers of a batch that every rank needs whole.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::rl::detail {

inline std::string shape_of(const at::Tensor& x) {
  if (!x.defined()) return "an undefined tensor";
  std::string text = "[";
  for (const auto size : x.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// [batch, time] of a floating-point dtype.
inline void check_tokens(const char* tag, const char* name, const at::Tensor& x) {
  require(x.defined() && x.dim() == 2, tag, "got {} for {}; expected [batch, time]", shape_of(x), name);
  require(x.is_floating_point(), tag, "{} is of {}; expected a floating-point dtype", name, c10::toString(x.scalar_type()));
}

inline void check_alike(const char* tag, const char* name, const at::Tensor& x, const char* other_name, const at::Tensor& other) {
  if (!x.defined() || x.sizes() != other.sizes())
    fail(tag, "got {} for {} and {} for {}; expected the same sizes", shape_of(x), name, shape_of(other), other_name);
}

// [batch], one number for each row of `mask` [batch, time].
inline void check_rows(const char* tag, const char* name, const at::Tensor& x, const at::Tensor& mask) {
  require(mask.defined() && mask.dim() == 2, tag, "got {} for the mask; expected [batch, time]", shape_of(mask));
  if (!x.defined() || x.dim() != 1 || x.size(0) != mask.size(0))
    fail(tag, "got {} for {} beside a mask of {}; expected [{}]", shape_of(x), name, shape_of(mask), mask.size(0));
}

inline void check_ids(const char* tag, const char* name, const at::Tensor& x) {
  require(x.scalar_type() == at::kLong, tag, "{} are of {}; expected int64", name, c10::toString(x.scalar_type()));
}

// The tokens that count: true where a mask of any dtype is not 0.
inline at::Tensor held(const at::Tensor& mask) { return mask.scalar_type() == at::kBool ? mask : mask.ne(0); }

// `x` with 0 in place of whatever is masked, be it NaN. Its gradient there is 0.
inline at::Tensor only(const at::Tensor& x, const at::Tensor& held) { return x.masked_fill(held.logical_not(), 0); }

// The whole of a tensor, plain and without gradient, on every rank. Gathers.
inline at::Tensor whole(const at::Tensor& x) { return full_tensor(x.detach()); }

// A plain tensor that is equal on every rank, as one that goes with `model`: replicated on its mesh, if it has one. Communicates nothing.
inline at::Tensor beside(const at::Tensor& plain, const at::Tensor& model) {
  const auto* layout = find_layout(model);
  if (layout == nullptr) return plain;
  const Placements everywhere(layout->mesh().ndim(), replicate());
  return from_local(plain, layout->mesh(), everywhere, plain.sizes()).tensor();
}

// Plain numbers [batch] for the tokens of their rows: [batch, time], 0 where masked.
inline at::Tensor for_tokens(const at::Tensor& rows, const at::Tensor& held, at::ScalarType dtype) {
  return beside(rows.to(dtype).unsqueeze(1), held).mul(held.to(dtype));
}

inline void check_finite(const char* tag, const char* name, const at::Tensor& plain) {
  const auto bad = plain.isfinite().logical_not();
  if (!bad.any().item<bool>()) return;
  const auto at = bad.reshape({-1}).to(at::kByte).argmax().item<int64_t>();
  fail(tag, "{} of shape {} have {} at index {}; expected finite numbers; hint: a verifier's failure should score 0", name, shape_of(plain),
       plain.reshape({-1})[at].item<double>(), at);
}

}  // namespace dtensor::rl::detail

#pragma GCC visibility pop
