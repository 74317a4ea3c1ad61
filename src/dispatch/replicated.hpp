// Compares plain tensors that should be equal on every rank.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace dtensor::dispatch {

// Whether the calling thread compares them; see set_replication_check().
extern thread_local bool checks_replicated;

// The ranks whose plain tensor differs from that of the mesh's first rank, as "1, 3". All ranks get the same text. Communicates a hash.
std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh);

// The same among the ranks that only differ in their coordinates along `dims`.
std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh, c10::ArrayRef<int64_t> dims);

// If a plain tensor that counts as replicated differs between ranks, throws on every rank, naming the operator and the ranks.
void check_replicated(std::string_view op, const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace dtensor::dispatch
