#include <dtensor/deferred/deferred_init.hpp>

#include "src/deferred/record.hpp"
#include "src/deferred/replay.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/rng/random.hpp>

#include <range/v3/action/push_back.hpp>
#include <torch/nn/module.h>

namespace dtensor {

using deferred::Tape;
using dispatch::Recorder;

// -- The region --------------------------------------------------------------------------------------------------------------

DeferredInit::DeferredInit(const DeviceMesh& mesh)
    : spmd_(mesh), recording_(Recorder::begin(std::make_shared<deferred::TapeRecorder>(Tape::of_this_thread()))) {}
DeferredInit::~DeferredInit() { recording_->end(); }
bool DeferredInit::active() { return Recorder::current() != nullptr; }

// -- Values ------------------------------------------------------------------------------------------------------------------

namespace {

class NotRecording {
 public:
  NotRecording() : region_(Recorder::begin(nullptr)) {}
  ~NotRecording() { region_->end(); }
  NotRecording(const NotRecording&) = delete;
  NotRecording& operator=(const NotRecording&) = delete;

 private:
  std::shared_ptr<detail::Region> region_;
};

at::Tensor in_layout(const at::Tensor& tensor, const LayoutPtr& layout) {
  return as_dtensor(tensor)->layout() == layout ? tensor : wrap(in_own_memory(as_dtensor(move_tensor(tensor, layout))->local()), layout);
}

// The deferred ones among tensors and their gradients, with the layouts that they shall have: a gradient gets the layout of its tensor.
std::vector<std::pair<at::Tensor, LayoutPtr>> with_gradients(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<std::pair<at::Tensor, LayoutPtr>> all;
  for (const auto& tensor : tensors) {
    if (is_deferred(tensor)) all.emplace_back(tensor, as_dtensor(tensor)->layout());
    if (!tensor.defined() || !tensor.is_leaf() || !is_deferred(tensor.grad())) continue;
    const auto& layout = as_dtensor(tensor.grad())->layout();
    all.emplace_back(tensor.grad(), as_dtensor(tensor) ? layout->with(as_dtensor(tensor)->layout()->placements()) : layout);
  }
  return all;
}

}  // namespace

bool is_deferred(const at::Tensor& tensor) { return tensor.defined() && dispatch::is_deferred(tensor); }

void materialize(c10::ArrayRef<at::Tensor> tensors) {
  std::shared_ptr<Tape> tape;
  std::vector<at::Tensor> metas;
  std::unordered_map<const c10::TensorImpl*, LayoutPtr> layouts;  // of those asked for
  deferred::Wishes wishes;
  for (const auto& [tensor, layout] : with_gradients(tensors)) {
    const auto& deferred = as_dtensor(tensor)->deferred();
    const auto own = std::static_pointer_cast<Tape>(deferred.owner());
    require(!tape || tape == own, "materialize", "the tensors were made by two threads; hint: call it for each of their modules");
    tape = own;
    metas.push_back(deferred.meta());
    layouts.emplace(metas.back().unsafeGetTensorImpl(), layout->present());
    wishes.emplace(metas.back().unsafeGetTensorImpl(), Placements(layout->placements().begin(), layout->placements().end()));
  }
  if (metas.empty()) return;
  require(!RankLocalRandom::active(), "materialize", "each rank would draw other values; hint: call it outside of dt::rank_local_random");
  NotRecording not_recording;
  const auto all = tape->sharing_memory(metas);
  for (const auto& deferred : all) metas.push_back(deferred->meta());
  auto values = deferred::replay_on_mesh(tape->needed_for(metas), metas, std::move(wishes));
  for (auto& [meta, layout] : layouts) values.at(meta) = in_layout(values.at(meta), layout);
  for (const auto& deferred : all) {
    const auto& value = values.at(deferred->meta().unsafeGetTensorImpl());
    for (const auto& handle : deferred->handles()) {
      auto& tensor = *as_dtensor(handle);
      const auto own = tensor.layout()->present();
      const bool alike = own->is_replicated() || own->placements() == as_dtensor(value)->layout()->placements();
      const auto given = alike ? value : in_layout(value, own);  // a layout of its own parts it from the others
      tensor.set_local(as_dtensor(given)->local(), as_dtensor(given)->layout());
    }
  }
}

void materialize(torch::nn::Module& module) {
  auto tensors = module.parameters();
  ranges::push_back(tensors, module.buffers());
  materialize(tensors);
}

void forget_values(torch::nn::Module& module) {
  auto tensors = module.parameters();
  ranges::push_back(tensors, module.buffers());
  forget_values(tensors);
}

void forget_values(c10::ArrayRef<at::Tensor> tensors) {
  NotRecording not_recording;
  NoSpmd plain;
  for (const auto& tensor : tensors) {
    require(as_dtensor(tensor), "forget_values", "a parameter or buffer is a plain tensor; hint: build the module inside dt::Spmd");
    as_dtensor(tensor)->forget_values();
  }
}

}  // namespace dtensor
