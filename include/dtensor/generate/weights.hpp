// Weights from the layout in which a model trains to that in which it generates.
//
//   dtensor::generate::copy_weights(*generating, *training);       // on all ranks of both meshes
//   engine.load_weights(*training, step);                          // the same, and the engine's cache is forgotten
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/collectives/pieces.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <map>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::generate {

using NamedWeights = std::map<std::string, at::Tensor>;

// A module's parameters and buffers.
NamedWeights named_weights(const torch::nn::Module& module);

// Copies tensors to the parameters and buffers of the same names, which keep their dtypes. Each may be plain or lie on any mesh of this
// world, in any layout, and so may its copy. Every rank of both meshes calls it. Each rank receives what it lacks, once, by one all_to_all
// for a tensor (docs/moves.md), and nothing is communicated where all have what they need. A plain parameter gets the whole tensor, by an
// all_gather on the mesh that the tensor lies on, which then has to have this rank. A plain tensor has to be equal on all ranks. One tensor
// is under way at a time. Names that `to` lacks are left out. Throws, before anything is written, for a name that `from` lacks and for
// other sizes.
void copy_weights(torch::nn::Module& to, const NamedWeights& from);
inline void copy_weights(torch::nn::Module& to, const torch::nn::Module& from) { copy_weights(to, named_weights(from)); }

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Throws for a name of `to` that `from` lacks, and for other sizes.
inline void check_weights(const NamedWeights& to, const NamedWeights& from, const char* who) {
  for (const auto& [name, target] : to) {
    const auto source = from.find(name);
    require(source != from.end(), who, "there are no weights for {}; got {} tensors of other names", name, from.size());
    require(source->second.sizes() == target.sizes(), who, "the weights of {} have sizes {}; expected {}", name,
            dtensor::detail::str_of(source->second.sizes()), dtensor::detail::str_of(target.sizes()));
  }
}

// `from` on the mesh and in the layout of `like`.
inline at::Tensor laid_out_like(const at::Tensor& from, const at::Tensor& like) {
  const auto* layout = find_layout(like);
  if (!layout) return full_tensor(from);
  if (!is_dtensor(from)) return distribute_tensor(from, layout->mesh(), layout->placements());
  return redistribute(from, layout->mesh(), layout->placements());
}

}  // namespace detail

inline NamedWeights named_weights(const torch::nn::Module& module) {
  NamedWeights all;
  for (const auto& item : module.named_parameters()) all.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) all.emplace(item.key(), item.value());
  return all;
}

inline void copy_weights(torch::nn::Module& to, const NamedWeights& from) {
  const auto targets = named_weights(to);
  detail::check_weights(targets, from, "generate");
  const NoSpmd plain;
  const at::NoGradGuard no_grad;
  for (const auto& [name, target] : targets) {
    const auto& source = from.at(name);
    if (source.unsafeGetTensorImpl() == target.unsafeGetTensorImpl()) continue;
    const auto moved = detail::laid_out_like(source, target);
    if (!is_dtensor(target) || !DTensor(target).is_absent()) at::Tensor(target).copy_(moved);
  }
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
