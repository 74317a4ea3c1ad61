// A model's tensors in the host's memory while others need the device's.
#pragma once

#include <dtensor/checkpoint/state.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <set>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// The memory of tensors, put away and brought back in place: handles, views and DTensors stay what they are.
class OffloadedStorages {
 public:
  // Copies this rank's parts to the host and frees where they were. Memory that several tensors share is copied once; absent tensors have
  // none. Nothing may read or write them until restore(). Without `keep` nothing is copied, and they have no values after it.
  void put_away(const std::vector<at::Tensor>& tensors, bool keep = true);
  // Allocates anew and copies back. Does nothing where nothing was put away.
  void restore();
  bool empty() const { return copies_.empty(); }
  int64_t bytes() const;  // in the host's memory

 private:
  struct Copy {
    c10::Storage storage;
    int64_t size;
    at::Tensor bytes;  // undefined: not kept
  };
  std::vector<Copy> copies_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline at::Tensor bytes_of(const c10::Storage& storage) {
  return at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()))
      .set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

// Parameters, their gradients, buffers, and the states of an optimizer.
inline std::vector<at::Tensor> tensors_of(const torch::nn::Module* module, torch::optim::Optimizer* optimizer) {
  std::vector<at::Tensor> all;
  if (module) {
    for (const auto& parameter : module->parameters()) {
      all.push_back(parameter);
      if (parameter.grad().defined()) all.push_back(parameter.grad());
    }
    for (const auto& buffer : module->buffers()) all.push_back(buffer);
  }
  if (optimizer) {
    checkpoints::Contents contents;
    checkpoints::make_part(*optimizer)->save("optimizer", {}, contents);
    for (const auto& [name, tensor] : contents.tensors) all.push_back(tensor);
  }
  return all;
}

}  // namespace detail

inline void OffloadedStorages::put_away(const std::vector<at::Tensor>& tensors, bool keep) {
  const NoSpmd plain;
  const at::NoGradGuard no_grad;
  restore();
  std::set<const c10::StorageImpl*> known;
  for (const auto& tensor : tensors) {
    if (is_dtensor(tensor) && DTensor(tensor).is_absent()) continue;
    const auto local = is_dtensor(tensor) ? DTensor(tensor.detach()).to_local() : tensor;
    const auto& storage = local.storage();
    if (storage.nbytes() == 0 || !known.insert(storage.unsafeGetStorageImpl()).second) continue;
    copies_.push_back({storage, static_cast<int64_t>(storage.nbytes()), {}});
    if (keep) copies_.back().bytes = detail::bytes_of(storage).to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  }
  for (auto& copy : copies_) {
    copy.storage.set_data_ptr(c10::DataPtr(nullptr, copy.storage.device()));
    copy.storage.set_nbytes(0);
  }
}

inline void OffloadedStorages::restore() {
  const NoSpmd plain;
  const at::NoGradGuard no_grad;
  for (auto& [storage, size, bytes] : copies_) {
    auto* const allocator = storage.allocator() ? storage.allocator() : c10::GetAllocator(storage.device().type());
    storage.set_data_ptr(allocator->allocate(size));
    storage.set_nbytes(size);
    if (bytes.defined()) detail::bytes_of(storage).copy_(bytes);
  }
  copies_.clear();
}

inline int64_t OffloadedStorages::bytes() const {
  int64_t sum = 0;
  for (const auto& copy : copies_) sum += copy.bytes.defined() ? copy.size : 0;
  return sum;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
