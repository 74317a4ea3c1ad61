// Reductions over many tensors (a norm of all gradients) in one collective: which ranks add up, so that each element counts once.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::detail {

// Tensors that are reduced over one group of ranks.
struct Spread {
  comm::Communicator* group = nullptr;  // null: this rank has them whole
  std::vector<size_t> members;          // indices of the tensors in the list
  std::vector<double> weights;          // per tensor: 1 / (number of ranks of the group that hold the same shard)
};

enum class Among {
  cut,        // the ranks along the mesh dimensions that shard any member
  all_ranks,  // all ranks of the members' meshes
};

// The groups for `tensors`. Plain tensors count as whole. Every placement but Replicate counts as sharded, so the caller must have
// reduced Partial tensors. A mesh shares the group of a larger one that has all of its ranks. Communicates nothing; equal layouts give
// every rank the same result.
std::vector<Spread> spread_of(c10::ArrayRef<at::Tensor> tensors, Among among = Among::cut);

// The local tensor, plain and without a gradient.
at::Tensor plain_local(const at::Tensor& tensor);

// The gradients of `parameters` that have one, each once, Partial ones reduced. Throws, with the caller's `tag`, for undefined
// parameters, sparse gradients and gradients on several devices.
std::vector<at::Tensor> gradients_of(std::string_view tag, c10::ArrayRef<at::Tensor> parameters);

}  // namespace dtensor::detail

#pragma GCC visibility pop
