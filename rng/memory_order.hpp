// A rank's part in the order of the whole tensor's memory, in which libtorch draws.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

namespace dtensor::rng {

// A rank's part, one-dimensional in that order, as a tensor of local sizes.
at::Tensor in_place(const at::Tensor& flat, const Layout& layout, const Sizes& order);

}  // namespace dtensor::rng
