// Flat layouts: a row of elements as the tensor that they make up.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

#pragma GCC visibility push(default)

namespace dtensor {

// The tensor that `elements` make up: the row that a flat layout cuts, in memory order. A view.
at::Tensor from_elements(const at::Tensor& elements, const Layout& layout);

}  // namespace dtensor

#pragma GCC visibility pop
