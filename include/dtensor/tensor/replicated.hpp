// Compares tensors that should be equal on every rank.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>

#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

// The ranks whose plain tensor differs from that of the mesh's first rank, as "1, 3"; empty where all are equal. Every rank of the mesh
// calls it, and gets the same text. Communicates a hash.
std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace dtensor

#pragma GCC visibility pop
