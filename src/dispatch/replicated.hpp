// What should be equal on every rank, compared.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace dtensor::dispatch {

// Whether the calling thread compares them: set_replication_check().
extern thread_local bool checks_replicated;

// The ranks on which a plain tensor differs from that of the mesh's first rank, "1, 3": on every rank alike. Communicates a hash.
std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh);

// Throws on every rank, naming operator and ranks, when a plain tensor that counts as replicated differs between ranks.
void check_replicated(std::string_view op, const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace dtensor::dispatch
