// A Frame remembers how to run a checkpointed function again. Each tensor that the function saved for backward has a numbered slot in its
// frame. The slots are empty until one is asked for. Then the function runs again, and the tensors that it saves fill the slots in the same
// order. A backward pass takes the value out of the slot, unless it keeps the graph for another pass: then the value stays as long as the
// node of the graph that saved it has it.
//
// A checkpoint inside another one saves its inputs like any other tensor, in slots of the outer frame.
#include <dtensor/training/checkpoint.hpp>

#include "src/training/kept_calls.hpp"
#include "src/training/operator_mode.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/gradients/kept_results.hpp>
#include <dtensor/gradients/saved_tensors.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/parallel/batch_rows.hpp>
#include <dtensor/parallel/overlap.hpp>
#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>

namespace dtensor::detail {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

constexpr const char* kTag = "checkpoint";

std::string describe(at::ScalarType dtype, c10::IntArrayRef sizes) {
  return fmt::format("{}[{}]", c10::toString(dtype), fmt::join(sizes, ", "));
}

// Thrown through the function when it has saved everything again, to end it.
struct Enough {};

struct Slot {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool stays = false;    // the value is kept from the forward on
  bool dropped = false;  // nobody will ask for it again
  at::Tensor value{};
  int64_t version = 0;
};

std::vector<c10::Device> devices_of(const Tensors& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.device().is_cpu()) continue;
    if (std::ranges::find(devices, tensor.device()) == devices.end()) devices.push_back(tensor.device());
  }
  return devices;
}

// Around the second run: autocast is set as in the first run, but without its cache of cast weights. Nobody would empty the cache after the
// backward, and the next forward would use old weights.
class AutocastAgain {
 public:
  AutocastAgain() = default;
  AutocastAgain(const AutocastAgain&) = delete;
  ~AutocastAgain() { set(before_); }
  struct Setting {
    bool remembers = at::autocast::is_autocast_cache_enabled();
#if !DTENSOR_TORCH_AT_LEAST(2, 0)  // ThreadLocalState has them later
    at::ScalarType of_cpu = at::autocast::get_autocast_cpu_dtype(), of_gpu = at::autocast::get_autocast_gpu_dtype();
#endif
  };
  static void set(const Setting& setting) {
    at::autocast::set_autocast_cache_enabled(setting.remembers);
#if !DTENSOR_TORCH_AT_LEAST(2, 0)
    at::autocast::set_autocast_cpu_dtype(setting.of_cpu);
    at::autocast::set_autocast_gpu_dtype(setting.of_gpu);
#endif
  }

 private:
  const Setting before_;
};

// The surroundings in which the function ran: the thread's modes, its rank and its regions.
class Surroundings {
 public:
  Surroundings() : world_(&World::current()) {
    if (Spmd::current()) mesh_ = *Spmd::current();
    autocast_.remembers = false;
  }

  class Again {
   public:
    explicit Again(const Surroundings& as) : modes_(as.modes_), overlap_(as.pieces_), rows_(as.rows_) {
      AutocastAgain::set(as.autocast_);
      if (&World::current() != as.world_) world_.emplace(*as.world_);
      require(as.draws_alone_ || !RankLocalRandom::active(), kTag,
              "the function ran outside of dt::rank_local_random(), and would run inside of it; hint: end the region before backward()");
      if (as.draws_alone_) draws_alone_.emplace();
      as.mesh_ ? void(spmd_.emplace(*as.mesh_)) : void(no_spmd_.emplace());
    }

   private:
    AutocastAgain autocast_;
    at::ThreadLocalStateGuard modes_;
    OverlapLinear overlap_;
    BatchRows rows_;
    std::optional<World::Use> world_;
    std::optional<RankLocalRandom> draws_alone_;
    std::optional<Spmd> spmd_;
    std::optional<NoSpmd> no_spmd_;
  };

 private:
  at::ThreadLocalState modes_;
  World* world_;
  std::optional<DeviceMesh> mesh_;
  int64_t pieces_ = OverlapLinear::pieces();
  std::optional<Interval> rows_ = BatchRows::current();
  AutocastAgain::Setting autocast_;
  bool draws_alone_ = RankLocalRandom::active();
};

class Frame {
 public:
  Frame(const Tensors& inputs, CheckpointRegion::Function again, const CheckpointOptions& options)
      : again_(std::move(again)), kept_(options.save), devices_(devices_of(inputs)) {
    for (const auto& input : inputs) {
      if (input.defined() && input.requires_grad() && input.is_leaf())
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(input));
      inputs_.emplace_back(input, /*is_output=*/false);
      require_grad_.push_back(input.defined() && input.requires_grad());
    }
    if (options.preserve_random) random_ = RandomState::now(devices_);
  }

  size_t add(const at::Tensor& tensor) {
    slots_.push_back({tensor.scalar_type(), tensor.sizes().vec()});
    needed_ = slots_.size();
    return slots_.size() - 1;
  }

  // The value of a slot. It is computed where it is not there, and taken out unless the backward pass keeps the graph.
  at::Tensor take(size_t index) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& slot = slots_[index];
    if (slot.stays) return slot.value;
    if (!slot.value.defined()) fill_slots();
    require(slot.value.defined(), kTag, "the function did not do the same again: it saved {} of {} tensors for backward", next_,
            slots_.size());
    require(slot.value._version() == slot.version, kTag,
            "a tensor {} that is needed for backward has been modified by an in-place operation; hint: write to a copy",
            describe(slot.dtype, slot.sizes));
    return torch::autograd::get_current_graph_task_keep_graph() ? slot.value : std::exchange(slot.value, {});
  }

  // Nobody will ask for this slot again.
  void drop(size_t index) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    slots_[index].dropped = true;
    slots_[index].value.reset();
  }

  // Fills the next slot. Throws Enough after the last.
  void fill(const at::Tensor& tensor) {
    require(next_ < slots_.size(), kTag, "the function did not do the same again: it saved more than {} tensors for backward",
            slots_.size());
    auto& slot = slots_[next_];
    require(tensor.scalar_type() == slot.dtype && tensor.sizes() == slot.sizes, kTag,
            "the function did not do the same again: tensor {} of what it saves for backward is {} and was {}; hint: it must not depend on "
            "what has changed since",
            next_, describe(tensor.scalar_type(), tensor.sizes()), describe(slot.dtype, slot.sizes));
    if (!slot.dropped) slot.value = tensor.tensor_data();
    slot.version = tensor._version();
    advance();
  }

  void advance() {
    if (++next_ >= needed_) throw Enough();
  }

  // Results of kept_in_checkpoints(), in the order of the calls.
  void keep_results(const Tensors& results) {
    auto& kept = results_.emplace_back();
    for (const auto& x : results) kept.push_back({x.defined() ? x.tensor_data() : x, x.defined() ? static_cast<int64_t>(x._version()) : 0});
  }
  Tensors results(size_t call) const {
    require(call < results_.size(), kTag, "the function did not do the same again: it computed more results that are kept than {}",
            results_.size());
    Tensors results;
    for (const auto& [x, version] : results_[call]) {
      require(!x.defined() || x._version() == version, kTag, "a kept result {} was written to in place; hint: write to a copy",
              x.defined() ? describe(x.scalar_type(), x.sizes()) : "");
      results.push_back(x.defined() ? x.tensor_data() : x);
    }
    return results;
  }

  const KeptOperators& kept() const { return kept_; }
  std::deque<KeptCall>& calls() { return calls_; }
  const std::vector<c10::Device>& devices() const { return devices_; }

  // Keeps the values of the last slots, those of a kept call; `tensors` are the values.
  void keep(const std::vector<at::Tensor>& tensors, const std::vector<SavedFrom>& from) {
    const auto first = slots_.size() - tensors.size();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (from[i].kind != SavedFrom::neither) continue;
      slots_[first + i].stays = true;
      slots_[first + i].value = tensors[i].tensor_data();
    }
  }

 private:
  void fill_slots();
  Tensors inputs_again() const {
    Tensors inputs;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const auto input = inputs_[i].unpack();
      inputs.push_back(input.defined() ? input.detach() : input);
      if (require_grad_[i]) inputs.back().set_requires_grad(true);
    }
    return inputs;
  }

  std::recursive_mutex mutex_;  // a function that runs again may end the graph that holds this frame
  std::vector<decltype(torch::autograd::impl::grad_accumulator(at::Tensor()))> accumulators_;  // which a SavedVariable does not hold
  std::vector<SavedVariable> inputs_;
  std::vector<bool> require_grad_;
  CheckpointRegion::Function again_;
  KeptOperators kept_;
  std::vector<c10::Device> devices_;
  Surroundings surroundings_;
  std::optional<RandomState> random_;
  std::deque<KeptCall> calls_;
  std::vector<std::vector<std::pair<at::Tensor, int64_t>>> results_;  // and their versions
  std::vector<Slot> slots_;
  size_t needed_ = 0;  // slots up to the last
  size_t next_ = 0;    // to be filled
};

// -- The forward -------------------------------------------------------------------------------------------------------------

class SlotHooks final : public SavedVariableHooks {
 public:
  SlotHooks(std::shared_ptr<Frame> frame, std::vector<at::Tensor>* seen) : frame_(std::move(frame)), seen_(seen) {}
  ~SlotHooks() override {
    if (index_) frame_->drop(*index_);
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = frame_->add(tensor);
    if (seen_) seen_->push_back(tensor);
    seen_ = nullptr;
  }
  at::Tensor call_unpack_hook() override { return frame_->take(index_.value()); }

 private:
  std::shared_ptr<Frame> frame_;
  std::vector<at::Tensor>* seen_;
  std::optional<size_t> index_;
};

class Recorder final : public SavedTensors, public OperatorMode, public ResultKeeper {
 public:
  explicit Recorder(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<SlotHooks>(frame_, seen_); }

  Tensors keep(const Compute& compute) override {
    const CallWith none(nullptr);
    const KeepWith outer(outer_);
    const auto results = kept_in_checkpoints(compute);
    frame_->keep_results(results);
    return results;
  }

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below, c10::Stack* stack) override {
    if (!frame_->kept().has(op)) return op.redispatchBoxed(below, stack);
    const auto arguments = tensors_on_top(*stack, op.schema().arguments().size());
    std::vector<at::Tensor> saved;
    const CallWith none(nullptr);
    seen_ = &saved;
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      seen_ = nullptr;
      throw;
    }
    seen_ = nullptr;
    frame_->calls().emplace_back(op, arguments, *stack, saved, frame_->devices());
    frame_->keep(saved, frame_->calls().back().saved());
  }

 private:
  std::shared_ptr<Frame> frame_;
  ResultKeeper* const outer_ = KeepWith::current();
  std::vector<at::Tensor>* seen_ = nullptr;  // what the kept call that is under way saves
};

// -- The second time ---------------------------------------------------------------------------------------------------------

// The graph of the second run is dropped.
class FillHooks final : public SavedVariableHooks {
 public:
  explicit FillHooks(Frame& frame) : frame_(&frame) {}
  void call_pack_hook(const at::Tensor& tensor) override { std::exchange(frame_, nullptr)->fill(tensor); }
  at::Tensor call_unpack_hook() override {
    fail(kTag, "backward went through the graph of a recomputation; hint: do not keep its tensors");
  }

 private:
  Frame* frame_;
};

class Filler final : public SavedTensors, public OperatorMode, public ResultKeeper {
 public:
  explicit Filler(Frame& frame) : frame_(frame) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<FillHooks>(frame_); }

  Tensors keep(const Compute&) override { return frame_.results(next_result_++); }

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below, c10::Stack* stack) override {
    if (!frame_.kept().has(op)) return op.redispatchBoxed(below, stack);
    require(next_ < frame_.calls().size(), kTag, "the function did not do the same again: it called {} once more than before",
            c10::toString(op.operator_name()));
    const auto& kept = frame_.calls()[next_++];
    const auto arguments = tensors_on_top(*stack, op.schema().arguments().size());
    const CallWith none(nullptr);
    const auto results = kept.replay(op, stack);
    for (const auto& from : kept.saved()) {
      if (from.kind == SavedFrom::neither) frame_.advance();
      else frame_.fill(from.kind == SavedFrom::argument ? arguments.at(from.index) : results.at(from.index));
    }
  }

 private:
  Frame& frame_;
  size_t next_ = 0, next_result_ = 0;  // of the kept calls and results
};

void Frame::fill_slots() {
  const Surroundings::Again as_before(surroundings_);
  const auto inputs = inputs_again();
  std::optional<RandomState> here;
  if (random_) {
    here = RandomState::now(devices_);
    random_->apply();
  }
  while (needed_ > 0 && (slots_[needed_ - 1].stays || slots_[needed_ - 1].dropped)) --needed_;
  next_ = 0;
  Filler filler(*this);
  try {
    const SaveWith fill(&filler);
    const CallWith call(kept_.empty() ? nullptr : &filler);
    const KeepWith keep(&filler);
    again_(inputs);
  } catch (const Enough&) {
  } catch (...) {
    if (here) here->apply();
    throw;
  }
  if (here) here->apply();
}

}  // namespace

struct CheckpointRegion::State {
  explicit State(std::shared_ptr<Frame> frame)
      : keeps(!frame->kept().empty()), recorder(std::move(frame)), save(&recorder), call(keeps ? &recorder : nullptr), keep(&recorder) {}
  bool keeps;
  Recorder recorder;
  SaveWith save;
  CallWith call;
  KeepWith keep;
};

CheckpointRegion::CheckpointRegion(Tensors inputs, Function again, const CheckpointOptions& options) {
  if (!c10::GradMode::is_enabled()) return;
  state_ = std::make_unique<State>(std::make_shared<Frame>(inputs, std::move(again), options));
}
CheckpointRegion::~CheckpointRegion() = default;

}  // namespace dtensor::detail
