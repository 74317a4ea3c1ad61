// Tensors that have no values yet, and the recorder of their calls.
#pragma once

#include "src/base/regions.hpp"
#include "src/dispatch/decision.hpp"
#include "src/dispatch/region.hpp"

#include <memory>

namespace dtensor::dispatch {

inline bool is_deferred(const at::Tensor& tensor) {
  const auto* impl = as_dtensor(tensor);
  return impl && impl->values() == Values::deferred;
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
