// Euclidean norms of tensors under any layouts.
#pragma once

#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/spread.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::optim {

// One norm for each tensor. Communicates 8 bytes for each, all in one all_reduce (where their meshes hold one another). Communicates
// nothing when no tensor is sharded.
std::vector<double> norms_of(const std::vector<at::Tensor>& tensors);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// The squared norm of this rank's shard, times `weight`.
inline at::Tensor squared_norm(const at::Tensor& tensor, double weight) {
  const auto part = dtensor::detail::plain_local(tensor);
  if (part.numel() == 0) return at::zeros({}, part.options().dtype(at::kDouble));
  const bool low = part.scalar_type() == at::kHalf || part.scalar_type() == at::kBFloat16;
  const auto norm = low ? at::linalg_vector_norm(part, 2, {}, false, at::kFloat) : at::linalg_vector_norm(part);
  return norm.to(at::kDouble).square().mul(weight);
}

}  // namespace detail

inline std::vector<double> norms_of(const std::vector<at::Tensor>& tensors) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  std::vector<double> norms(tensors.size());
  for (const auto& spread : dtensor::detail::spread_of(tensors)) {
    std::vector<at::Tensor> squares;
    for (size_t i = 0; i < spread.members.size(); ++i) {
      squares.push_back(detail::squared_norm(tensors[spread.members[i]], spread.weights[i]));
    }
    auto all = at::stack(squares);
    if (spread.group) all = spread.group->all_reduce(all, ReduceOp::sum).get();
    all = all.sqrt().cpu();
    for (size_t i = 0; i < spread.members.size(); ++i) norms[spread.members[i]] = all.data_ptr<double>()[i];
  }
  return norms;
}

}  // namespace dtensor::optim

#pragma GCC visibility pop
