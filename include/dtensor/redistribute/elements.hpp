// Flat layouts: from elements in a row to the tensor that they are.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

namespace dtensor {

// The elements that a flat layout cuts, in memory order, as the tensor that they make up: a view.
at::Tensor from_elements(const at::Tensor& elements, const Layout& layout);

}  // namespace dtensor
