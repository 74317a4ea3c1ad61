// Saves and loads modules and optimizers with distributed tensors, in the files of torch::save and torch::load.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#pragma GCC visibility push(default)

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace dtensor {

class State;  // <dtensor/checkpoint/checkpoint.hpp> saves and loads it

namespace detail {

void save_module(const torch::nn::Module& module, const std::string& path);
void load_module(torch::nn::Module& module, const std::string& path);
void save_optimizer(const torch::optim::Optimizer& optimizer, const std::string& path);
void load_optimizer(torch::optim::Optimizer& optimizer, const std::string& path);
void save_tensors(const std::vector<at::Tensor>& tensors, const std::string& path);
void load_tensors(std::vector<at::Tensor>& tensors, const std::string& path);
void save_archive(const std::function<void(torch::serialize::OutputArchive&)>& save, const std::string& path);
void load_archive(const std::function<void(torch::serialize::InputArchive&)>& load, const std::string& path);

// A value that holds a module, such as torch::nn::Linear or std::shared_ptr<torch::nn::LinearImpl>.
template <class Value>
concept holds_module = requires(Value& value) {
  { *value } -> std::convertible_to<const torch::nn::Module&>;
};

}  // namespace detail

// Writes the file that torch::save(value, path) writes on one device. Plain torch::load reads it, and so does load() below, on any mesh.
//
//   dt::save(model, "model.pt");  // every rank calls it, and one writes
//   dt::save(optimizer, "optimizer.pt");
//
// `value` is
// - a module, or what holds one (torch::nn::Linear, std::shared_ptr): all parameters and buffers are written, whatever their layouts, as
//   torch::nn::Module::save does it; a module's own save(archive) is not called;
// - an optimizer: any of libtorch's, or of dtensor/optim;
// - a tensor, or a std::vector of tensors;
// - anything else that has save(torch::serialize::OutputArchive&) const (lr::Scheduler, GradScaler) and writes equal values on all ranks.
//
// All ranks of the meshes that the tensors lie on call it (all ranks of the world, if no tensor is distributed). It gathers one tensor
// after the other. The first of these ranks keeps them in host memory and writes; the others keep none. The file has CPU tensors. It is
// written under another name and then renamed, so `path` is either the whole file or what it was before. When this returns, the file is
// there.
//
// Throws on every rank for a file that cannot be written (a missing folder, a full disk), for deferred tensors, and for optimizers that
// have distributed parameters and a state whose type is not libtorch's.
template <class Value>
  requires(!std::is_same_v<Value, State>)
void save(const Value& value, const std::string& path) {
  if constexpr (std::is_convertible_v<const Value&, const torch::nn::Module&>) {
    detail::save_module(value, path);
  } else if constexpr (detail::holds_module<const Value>) {
    detail::save_module(*value, path);
  } else if constexpr (std::is_convertible_v<const Value&, const torch::optim::Optimizer&>) {
    detail::save_optimizer(value, path);
  } else if constexpr (std::is_convertible_v<const Value&, const at::Tensor&>) {
    detail::save_tensors({value}, path);
  } else if constexpr (std::is_convertible_v<const Value&, const std::vector<at::Tensor>&>) {
    detail::save_tensors(value, path);
  } else {
    detail::save_archive([&](auto& archive) { value.save(archive); }, path);
  }
}

// Reads a file of torch::save or of save() above. The first of the ranks reads it and sends the others each tensor in turn.
//
//   dt::load(model, "model.pt");  // after parallelize_module and fully_shard; every rank calls it
//   dt::load(optimizer, "optimizer.pt");
//
// - A module's parameters and buffers get the file's values and keep their layouts. What else the file has is ignored, as torch::load does.
// - An optimizer's states get the layouts of their parameters. As torch::load, it identifies parameters by their order, and leaves states
//   that the file lacks.
// - Tensors are replaced by the file's tensors, whole and plain, on every rank. Inside Spmd these count as replicated.
//
// Throws on every rank, and leaves `value` as it was, for a file that cannot be read. It also does so for names that the file lacks, and
// for sizes and dtypes that differ; the error lists all of them.
template <class Value>
  requires(!std::is_same_v<std::remove_const_t<Value>, State>)
void load(Value& value, const std::string& path) {
  if constexpr (std::is_convertible_v<Value&, torch::nn::Module&>) {
    detail::load_module(value, path);
  } else if constexpr (detail::holds_module<Value>) {
    detail::load_module(*value, path);
  } else if constexpr (std::is_convertible_v<Value&, torch::optim::Optimizer&>) {
    detail::load_optimizer(value, path);
  } else if constexpr (std::is_same_v<Value, at::Tensor>) {
    std::vector<at::Tensor> tensors;
    detail::load_tensors(tensors, path);
    value = tensors.at(0);
  } else if constexpr (std::is_same_v<Value, std::vector<at::Tensor>>) {
    detail::load_tensors(value, path);
  } else {
    detail::load_archive([&](auto& archive) { value.load(archive); }, path);
  }
}

}  // namespace dtensor

#pragma GCC visibility pop
