// Tensors whose values are not there yet, and the calls that are recorded for them.
#pragma once

#include "src/base/regions.hpp"
#include "src/dispatch/decision.hpp"
#include "src/dispatch/region.hpp"

#include <memory>

namespace dtensor::dispatch {

// Takes the place of the work that would bring a tensor's values.
class Deferred final : public comm::Work {
 public:
  // `meta`: the tensor on the meta device, views sharing memory with their bases. `owner` lives as long as this.
  Deferred(at::Tensor meta, std::shared_ptr<void> owner) : meta_(std::move(meta)), owner_(std::move(owner)) {}

  const at::Tensor& meta() const { return meta_; }
  const std::shared_ptr<void>& owner() const { return owner_; }

  // Those who wait for it.
  void add_handle(DTensorImpl& impl);
  std::vector<at::Tensor> handles() const;

  void wait() override;  // throws
  bool done() override { return false; }
  void release_resources() override;  // lets go of the owner, which may know this weakly

 private:
  at::Tensor meta_;
  std::shared_ptr<void> owner_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> handles_;
};

inline bool is_deferred(const at::Tensor& tensor) {
  auto* impl = as_dtensor(tensor);
  return impl && impl->layout()->is_deferred();
}

// Takes calls of the thread instead of running them.
class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  virtual ~Recorder() = default;

  // Replaces the arguments (stack[begin..]) by results.
  virtual void record(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack, size_t begin) = 0;

  // Null when calls run.
  static Recorder* current() { return region & kRecording ? recorder : nullptr; }

  // Makes `recorder` that of the thread for a while; null: calls run.
  static std::shared_ptr<detail::Region> begin(std::shared_ptr<Recorder> recorder);

 private:
  struct Setting;
  static thread_local Recorder* recorder;
};

}  // namespace dtensor::dispatch
