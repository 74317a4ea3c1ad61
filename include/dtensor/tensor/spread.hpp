// Which ranks have to add up what they know of their parts of some tensors, so that each element counts once, in one collective.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace dtensor::detail {

// Tensors whose ranks meet in one group.
struct Spread {
  comm::Communicator* group = nullptr;  // null: this rank has them whole
  std::vector<size_t> members;          // their indices in the list
  std::vector<double> weights;          // of each: one by the number of ranks of the group that have the same part
};

enum class Among {
  cut,        // the ranks along the mesh dimensions on which any member is cut
  all_ranks,  // all ranks of the members' meshes
};

// Plain tensors are whole, and so is, by then, what is not Replicate (Partial tensors are the caller's to reduce). A mesh joins the group of a
// larger one that has all of its ranks. Communicates nothing; every rank gets the same of the same layouts.
std::vector<Spread> spread_of(c10::ArrayRef<at::Tensor> tensors, Among among = Among::cut);

// This rank's part of a tensor, plain and without a gradient.
at::Tensor part_of(const at::Tensor& tensor);

// The gradients of `parameters` that have one, each once and with Partial ones reduced. `tag` is the caller's, for errors: undefined
// parameters, sparse gradients, several devices.
std::vector<at::Tensor> gradients_of(std::string_view tag, c10::ArrayRef<at::Tensor> parameters);

}  // namespace dtensor::detail
