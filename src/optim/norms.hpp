// Euclidean norms of tensors under any layouts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dtensor::optim {

// One norm for each tensor. Communicates 8 bytes for each, all in one all_reduce (where their meshes hold one another). Communicates
// nothing when no tensor is sharded.
std::vector<double> norms_of(const std::vector<at::Tensor>& tensors);

}  // namespace dtensor::optim
