// Composite operators that read memory themselves, above autograd, where a DTensor has none.
#include <dtensor/tensor.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/max_pool1d_ops.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <torch/library.h>

namespace dtensor::dispatch {

namespace {

// The mode of every rank's thread, above autograd (rng/rank_generator.cpp).
constexpr c10::DispatchKey kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Without gradients, libtorch's own takes a kernel that is no operator.
at::Tensor max_pool1d(c10::DispatchKeySet keys, const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if (is_dtensor(self)) return std::get<0>(at::max_pool1d_with_indices(self, kernel, stride, padding, dilation, ceil_mode));
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMode);
  return at::_ops::max_pool1d::redispatch(below, self, kernel, stride, padding, dilation, ceil_mode);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) { library.impl("max_pool1d", TORCH_FN(max_pool1d)); }

}  // namespace

}  // namespace dtensor::dispatch
