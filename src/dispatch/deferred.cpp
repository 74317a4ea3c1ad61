#include "src/dispatch/deferred.hpp"

#include <dtensor/base/error.hpp>
#include <fmt/ranges.h>

namespace dtensor::dispatch {

thread_local Recorder* Recorder::recorder = nullptr;

struct Recorder::Setting {
  Recorder* to;

  static Setting now() { return {recorder}; }
  void apply() const {
    recorder = to;
    region = (region & ~kRecording) | (to ? kRecording : 0);
  }
};

std::shared_ptr<detail::Region> Recorder::begin(std::shared_ptr<Recorder> recorder) {
  auto* to = recorder.get();
  return detail::RegionOf<Setting>::begin({to}, std::move(recorder));
}

void Deferred::add_handle(DTensorImpl& impl) {
  handles_.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(&impl));
}

std::vector<at::Tensor> Deferred::handles() const {
  std::vector<at::Tensor> alive;
  for (const auto& handle : handles_) {
    auto impl = handle.lock();
    if (impl && static_cast<DTensorImpl*>(impl.get())->waits_for(*this)) alive.emplace_back(std::move(impl));
  }
  return alive;
}

void Deferred::release_resources() {
  handles_.clear();
  meta_.reset();
  owner_.reset();
}

void Deferred::refuse() const {
  fail("DeferredInit", "the values of a tensor of sizes {} are not there yet; hint: call dt::materialize on it, or on its module, first",
       meta_.sizes().vec());
}

}  // namespace dtensor::dispatch
