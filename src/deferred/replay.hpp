// Doing what a tape says.
#pragma once

#include "src/deferred/tape.hpp"

#include <unordered_map>

namespace dtensor::deferred {

// By tensor of the tape.
using Values = std::unordered_map<const c10::TensorImpl*, at::Tensor>;
using Wishes = std::unordered_map<const c10::TensorImpl*, Placements>;

// Values of `metas`, whole plain tensors, computed as on one device.
Values replay_on_one_device(const Entries& entries, c10::ArrayRef<at::Tensor> metas);

// Distributed ones. Where a tensor is wished to lie in some way, it and what it is made of, if of the same sizes, are made so from the
// start.
Values replay_on_mesh(const Entries& entries, c10::ArrayRef<at::Tensor> metas, Wishes wishes);

}  // namespace dtensor::deferred
