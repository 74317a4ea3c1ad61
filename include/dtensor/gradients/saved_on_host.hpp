// What a forward pass saves, in the host's memory until the backward pass needs it. <dtensor/dtensor.hpp> does not include this header.
//
//   dt::SavedOnHost on_host({.share = 0.5, .except = model->parameters()});
//   {
//     dt::SaveWith save(&on_host);
//     loss = model->forward(x);      // half of what this saves is copied to the host, and freed on the device
//   }
//   loss.backward();                 // copies it back, each tensor when it is needed
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/gradients/saved_tensors.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

struct OnHostOptions {
  double share = 1;                     // of the bytes that are saved; the rest stays where it is
  int64_t at_least_bytes = 1 << 16;     // of a rank's part of a tensor; smaller ones stay
  std::vector<at::Tensor> except = {};  // these and their views stay: the parameters, which are there in any case
  bool of_cpu = false;                  // copies tensors of the CPU as well, to try a program where there is no GPU
};

// Takes part in a SaveWith. Values are those that were saved, to the bit. A tensor that several operators save is copied once. Copies go to
// pinned memory where there is CUDA, in the order of the device's stream. Communicates nothing. Throws for a share outside of 0 to 1.
class SavedOnHost final : public SavedTensors {
 public:
  explicit SavedOnHost(OnHostOptions options = {});
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;
  int64_t bytes() const { return *bytes_; }  // in the host's memory now; a graph that is freed gives its own back

 private:
  static constexpr size_t kKnown = 16;
  class Hooks;
  struct Copy;
  // A tensor that was seen, as long as its memory is not another's.
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>, at::ScalarType, int64_t> view;  // offset to version
    bool stays;
    std::weak_ptr<Copy> copy;
  };
  std::shared_ptr<Copy> copy_of(const at::Tensor& local);
  bool stays(const at::Tensor& local) const;

  OnHostOptions options_;
  std::shared_ptr<std::atomic<int64_t>> bytes_ = std::make_shared<std::atomic<int64_t>>(0);
  double seen_ = 0, moved_ = 0;  // bytes
  std::deque<Known> known_;      // the last few: operators that save one tensor follow each other
};

// -- How ------------------------------------------------------------------------------------------------------------------

struct SavedOnHost::Copy {
  Copy(const at::Tensor& local, std::shared_ptr<std::atomic<int64_t>> sum) : device(local.device()), all(std::move(sum)) {
    const auto options = local.options().device(at::kCPU).pinned_memory(local.is_cuda());
    values = at::empty_strided(local.sizes(), local.strides(), options).copy_(local, /*non_blocking=*/true);
    *all += static_cast<int64_t>(values.storage().nbytes());
  }
  ~Copy() { *all -= static_cast<int64_t>(values.storage().nbytes()); }
  at::Tensor back() const { return device.is_cpu() ? values : values.to(device, /*non_blocking=*/true); }

  at::Tensor values;
  c10::Device device;
  std::shared_ptr<std::atomic<int64_t>> all;
};

class SavedOnHost::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(SavedOnHost& owner) : owner_(owner) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const NoSpmd plain;
    const at::NoGradGuard no_grad;
    const auto* layout = find_layout(tensor);
    if (!layout || !(layout->is_absent() || layout->is_flat())) copy_ = owner_.copy_of(layout ? DTensor(tensor).to_local() : tensor);
    if (!copy_) stays_ = tensor;
    else if (layout) where_ = Where{layout->mesh(), {layout->placements().begin(), layout->placements().end()}, layout->sizes().vec()};
  }

  at::Tensor call_unpack_hook() override {
    if (!copy_) return stays_;
    const NoSpmd plain;
    const at::NoGradGuard no_grad;
    return where_ ? from_local(copy_->back(), where_->mesh, where_->placements, where_->sizes).tensor() : copy_->back();
  }

 private:
  struct Where {
    DeviceMesh mesh;
    Placements placements;
    std::vector<int64_t> sizes;
  };
  SavedOnHost& owner_;
  std::shared_ptr<Copy> copy_;
  std::optional<Where> where_;  // of a DTensor
  at::Tensor stays_;            // where there is no copy
};

inline SavedOnHost::SavedOnHost(OnHostOptions options) : options_(std::move(options)) {
  require(options_.share >= 0 && options_.share <= 1, "SavedOnHost", "got a share of {}; expected 0 to 1", options_.share);
}

inline std::unique_ptr<torch::autograd::SavedVariableHooks> SavedOnHost::hooks() { return std::make_unique<Hooks>(*this); }

inline bool SavedOnHost::stays(const at::Tensor& local) const {
  if ((local.is_cpu() && !options_.of_cpu) || !local.has_storage()) return true;
  if (static_cast<int64_t>(local.nbytes()) < options_.at_least_bytes) return true;
  return std::ranges::any_of(options_.except, [&](const at::Tensor& kept) {
    if (!is_dtensor(kept)) return kept.is_alias_of(local);
    const auto* layout = find_layout(kept);
    return !layout->is_absent() && !layout->is_flat() && DTensor(kept.detach()).to_local().is_alias_of(local);
  });
}

// The bytes that moved keep up with the share of those that were seen.
inline std::shared_ptr<SavedOnHost::Copy> SavedOnHost::copy_of(const at::Tensor& local) {
  if (stays(local)) return nullptr;
  auto* const storage = local.storage().unsafeGetStorageImpl();
  const std::tuple view{local.storage_offset(), local.sizes().vec(), local.strides().vec(), local.scalar_type(), int64_t{local._version()}};
  for (const auto& known : known_) {
    if (known.memory.lock().get() != storage || known.view != view) continue;
    auto copy = known.copy.lock();
    if (copy || known.stays) return copy;
  }
  const auto bytes = static_cast<double>(local.nbytes());
  seen_ += bytes;
  const bool stays = moved_ + bytes > options_.share * seen_;
  if (!stays) moved_ += bytes;
  auto copy = stays ? nullptr : std::make_shared<Copy>(local, bytes_);
  c10::raw::intrusive_ptr::incref(storage);
  const auto memory = c10::intrusive_ptr<c10::StorageImpl>::reclaim(storage);
  known_.push_front({c10::weak_intrusive_ptr<c10::StorageImpl>(memory), view, stays, copy});
  if (known_.size() > kKnown) known_.pop_back();
  return copy;
}

}  // namespace dtensor

#pragma GCC visibility pop
