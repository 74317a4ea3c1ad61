// Runs the calls of a tape.
#pragma once

#include "src/deferred/tape.hpp"

#include <unordered_map>

namespace dtensor::deferred {

// By tensor of the tape: its value, and the placements that it should get.
using Values = std::unordered_map<const c10::TensorImpl*, at::Tensor>;
using Wishes = std::unordered_map<const c10::TensorImpl*, Placements>;

// Computes the values of `metas` as on one device: whole plain tensors.
Values replay_on_one_device(const Entries& entries, c10::ArrayRef<at::Tensor> metas);

// Computes the values of `metas` as distributed tensors. A tensor with a wish is made with those placements from the start, and so are
// tensors of the same sizes that it is computed from.
Values replay_on_mesh(const Entries& entries, c10::ArrayRef<at::Tensor> metas, Wishes wishes);

}  // namespace dtensor::deferred
