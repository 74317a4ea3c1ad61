// Pieces of a torch::nn::Sequential, whose modules say themselves how they are called.
#pragma once

#include <dtensor/parallel/pipeline/cut.hpp>

#include <torch/nn/modules/container/sequential.h>

#pragma GCC visibility push(default)

namespace dtensor {

// A piece for each module, of one tensor to one tensor. `name`: what the sequential is registered as in the module that is cut, "layers";
// empty where it is that module itself.
//
//   dt::pipeline(*model, mesh, dt::pieces(model))                       // model: a torch::nn::Sequential
inline std::vector<Piece> pieces(const torch::nn::Sequential& modules, const std::string& name = "") {
  std::vector<Piece> result;
  for (const auto& module : *modules) {
    auto own = (name.empty() ? "" : name + ".") + std::to_string(result.size());
    const auto run = [called = torch::nn::AnyModule(module)](const at::Tensor& x) mutable { return called.forward<at::Tensor>(x); };
    result.push_back(piece(std::move(own), run));
  }
  return result;
}

}  // namespace dtensor

#pragma GCC visibility pop
