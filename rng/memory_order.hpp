// A rank's shard in the order of the whole tensor's memory, in which libtorch draws.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

namespace dtensor::rng {

// Turns a rank's shard, one-dimensional in that order, into a tensor of local sizes.
at::Tensor in_place(const at::Tensor& flat, const Layout& layout, const Sizes& order);

}  // namespace dtensor::rng
