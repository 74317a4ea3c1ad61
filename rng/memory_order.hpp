// The order of a tensor's elements in memory, in which libtorch draws them.
#pragma once

#include <dtensor/layout.hpp>

#include <ATen/core/Tensor.h>

namespace dtensor::rng {

// The dims by their strides: the last varies fastest.
Sizes memory_order(c10::IntArrayRef strides);

// A rank's part, one-dimensional in that order, as a tensor of local sizes.
at::Tensor in_place(const at::Tensor& flat, const Layout& layout, const Sizes& order);

}  // namespace dtensor::rng
