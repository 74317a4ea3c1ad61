// Notices ranks that train apart: their copies of a parameter should be equal, and are not.
#pragma once

#include <ATen/core/Tensor.h>

namespace dtensor {

// Looks at the gradient that a backward pass brings to a leaf, before it is reduced. Along the mesh dimensions where the leaf is
// replicated, ranks now and then compare a hash: of the gradient, where it comes in replicated as well (which shows that ranks have other
// data); of the leaf, where the gradient is summed (which shows another learning rate). Compares small leaves only, and gradients only on
// CPUs: on GPUs some kernels add in any order. Off with set_replication_check(false). Throws on every rank.
void check_drift(const at::Tensor& leaf, const at::Tensor& gradient);

}  // namespace dtensor
