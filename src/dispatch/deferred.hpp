// Tensors that have no values yet, and the recorder of their calls.
#pragma once

#include "src/base/regions.hpp"
#include "src/dispatch/decision.hpp"
#include "src/dispatch/region.hpp"

#include <memory>

namespace dtensor::dispatch {

// Stands in place of the work that fills a tensor, while it has no values.
class Deferred final : public comm::Work {
 public:
  // `meta` is the tensor on the meta device, where views share memory with their bases. `owner` is kept alive.
  Deferred(at::Tensor meta, std::shared_ptr<void> owner) : meta_(std::move(meta)), owner_(std::move(owner)) {}

  const at::Tensor& meta() const { return meta_; }
  const std::shared_ptr<void>& owner() const { return owner_; }

  // The tensors that wait for it.
  void add_handle(DTensorImpl& impl);
  std::vector<at::Tensor> handles() const;

  void wait() override;  // throws
  bool done() override { return false; }
  void release_resources() override;  // releases the owner, which may refer to this weakly

 private:
  at::Tensor meta_;
  std::shared_ptr<void> owner_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> handles_;
};

inline bool is_deferred(const at::Tensor& tensor) {
  auto* impl = as_dtensor(tensor);
  return impl && impl->layout()->is_deferred();
}

// Records the calls of a thread instead of running them.
class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  virtual ~Recorder() = default;

  // Replaces the arguments (stack[begin..]) by results.
  virtual void record(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack, size_t begin) = 0;

  // Null if calls run.
  static Recorder* current() { return region & kRecording ? recorder : nullptr; }

  // Makes `recorder` the thread's until the region ends; with null, calls run.
  static std::shared_ptr<detail::Region> begin(std::shared_ptr<Recorder> recorder);

 private:
  struct Setting;
  static thread_local Recorder* recorder;
};

}  // namespace dtensor::dispatch
