// A gradient accumulates in its parameter's layout: leaves get a hook on first use that moves what backward brings.
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/key.hpp"
#include "src/gradients/add_hook.hpp"
#include "src/gradients/drift.hpp"
#include "src/gradients/gradient_buckets.hpp"
#include "src/mesh/world_state.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/alias.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/redistribute/redistribute.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace dtensor {

namespace {

// The last move of a leaf's gradient: the next is the same, as a rule.
struct LastMove {
  LayoutPtr from, to;
  comm::Communicator* sums = nullptr;  // where it is nothing but a sum over this group
  ReduceOp op = ReduceOp::sum;

  LastMove() = default;
  LastMove(LayoutPtr before, LayoutPtr after) : from(std::move(before)), to(std::move(after)) {
    const auto plan = plan_move(from, to);
    if (plan.steps.size() != 1) return;
    const auto& step = plan.steps[0];
    if (!step.to.is_replicate() || !(step.from.is_partial(ReduceOp::sum) || step.from.is_partial(ReduceOp::avg))) return;
    sums = &from->mesh().communicator(step.mesh_dims);
    op = step.from.op;
  }
};

// Whether nobody but the engine, which runs a hook now, has this tensor or its memory.
bool is_only_ours(const at::Tensor& gradient) {
  constexpr size_t kOfEngine = DTENSOR_TORCH_AT_LEAST(2, 0) ? 1 : 3;  // handles
  return gradient.use_count() <= kOfEngine && as_dtensor(gradient)->local().use_count() == 1;
}

at::Tensor in_layout(const at::Tensor& gradient, const LayoutPtr& like, LastMove& last, ModuleName module) {
  const auto& layout = as_dtensor(gradient)->layout();
  if (layout->placements() == like->placements()) return gradient;
  if (layout->is_absent()) return redistribute(gradient, like->placements());
  if (layout != last.from || last.to->placements() != like->placements()) last = LastMove(layout, layout->with(like->placements()));
  comm::Cause cause("gradient", true, module ? std::string_view(*module) : std::string_view());
  if (gradient.requires_grad() && c10::GradMode::is_enabled()) return redistribute(gradient, like->placements());  // create_graph
  const auto& part = as_dtensor(gradient)->local();
  const bool alone = like->mesh().size() == 1 && part.sizes() == last.to->local_sizes();
  if (alone && is_only_ours(gradient)) return wrap(part, last.to);
  if (last.sums && last.sums->size() > 1 && fits_bucket(part, *last.to)) return reduce_in_bucket(part, last.to, *last.sums, last.op);
  return move_tensor(gradient, last.to);
}

// Whether the gradient is one that autograd::grad asked for, which the leaf does not get. (Before libtorch 2.0 no hook sees it.)
bool is_only_captured(const at::Tensor& leaf) {
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (!tasks || tasks->empty()) return false;
  const auto task = tasks->find(torch::autograd::impl::grad_accumulator(leaf).get());
  return task != tasks->end() && !task->second.needed_;
}

// Of a rank: how many NoSync live.
struct Deferring {
  std::atomic<int> no_sync = 0;
};

// A sum of which this rank's part is its shard amid zeros: `accumulated`, with the mesh dimensions `cut` pending. Communicates nothing.
// Undefined where the shard is no view of the whole.
at::Tensor amid_zeros(const at::Tensor& accumulated, c10::IntArrayRef cut) {
  const auto old = as_dtensor(accumulated)->layout();
  Placements whole(old->placements()), pending(old->placements());
  for (const auto m : cut) whole[m] = replicate(), pending[m] = partial();
  const auto uncut = old->with(whole);
  const auto views = [](const auto& step) { return step.from.is_replicate() && step.to.is_shard() && step.to.split == 1; };
  if (old->is_absent() || !detail::in_row_major_order(*old) || !std::ranges::all_of(plan_move(uncut, old).steps, views)) return {};
  const LocalMode local;
  const auto& shard = as_dtensor(accumulated)->local();
  auto sum = at::zeros(uncut->local_sizes(), shard.options());
  move_local(sum, uncut, old).get().copy_(shard);
  return wrap(std::move(sum), old->with(pending));
}

// A gradient that is on all ranks whole or in shards, as after zero_grad(), becomes pending where the one that will be added to it is: that
// communicates nothing, and adding would reduce the other one.
void defer_with(at::Tensor& accumulated, const at::Tensor& gradient, ModuleName module) {
  auto* old = accumulated.defined() ? as_dtensor(accumulated) : nullptr;
  if (!old || accumulated.requires_grad() || old->layout()->mesh() != as_dtensor(gradient)->layout()->mesh()) return;
  const auto& wanted = as_dtensor(gradient)->layout()->placements();
  c10::SmallVector<int64_t, 4> whole, cut;
  for (int64_t m = 0; m < static_cast<int64_t>(wanted.size()); ++m) {
    if (!wanted[m].is_partial(ReduceOp::sum)) continue;
    if (old->layout()->placements()[m].is_replicate()) whole.push_back(m);
    if (old->layout()->placements()[m].is_shard()) cut.push_back(m);
  }
  if (!cut.empty()) {
    if (auto sum = amid_zeros(accumulated, cut); sum.defined()) accumulated = std::move(sum);
  }
  if (whole.empty()) return;
  const auto now = as_dtensor(accumulated)->layout();
  Placements placements(now->placements());
  for (const auto m : whole) placements[m] = wanted[m];
  LastMove none;
  accumulated = in_layout(accumulated, now->with(placements), none, module);
}

// Runs before the engine accumulates `gradient` into the leaf.
at::Tensor on_gradient(const c10::weak_intrusive_ptr<c10::TensorImpl>& weak_leaf, const at::Tensor& gradient, LastMove& last) {
  auto leaf_impl = weak_leaf.lock();
  if (!leaf_impl || !gradient.defined() || !as_dtensor(gradient)) return at::Tensor();
  const at::Tensor leaf(std::move(leaf_impl));
  if (is_only_captured(leaf)) return at::Tensor();
  const auto& member = as_dtensor(leaf)->member();
  const auto layout = as_dtensor(leaf)->layout();
  const auto module = as_dtensor(leaf)->module;
  const bool defer = layout->mesh().world().local<Deferring>().no_sync > 0;
  if (member) return member->group->reduce(member->index, leaf, gradient, defer);
  check_drift(leaf, gradient);
  auto& accumulated = leaf.mutable_grad();
  if (defer) {
    defer_with(accumulated, gradient, module);
    return at::Tensor();
  }
  if (accumulated.defined() && as_dtensor(accumulated) && as_dtensor(accumulated)->layout()->has_partial()) {
    const auto deferred = std::exchange(accumulated, at::Tensor());
    return in_layout(at::add(deferred, gradient), layout, last, module);
  }
  return in_layout(gradient, layout, last, module);
}

// A hook of a leaf that runs after all that register_hook adds, also later: those get the gradient that backward brings, and what they
// return is moved and added to what is there.
struct GradientHook final : torch::autograd::FunctionPreHook {
  explicit GradientHook(const at::Tensor& leaf) : leaf_(leaf.getIntrusivePtr()) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const auto moved = on_gradient(leaf_, gradients[0], last_);
    return {moved.defined() ? moved : gradients[0]};
  }

 private:
  const c10::weak_intrusive_ptr<c10::TensorImpl> leaf_;
  LastMove last_;
};

}  // namespace

// Of the rank: backward may run in a thread of libtorch's.
NoSync::NoSync() { ++World::current().local<Deferring>().no_sync; }
NoSync::~NoSync() { --World::current().local<Deferring>().no_sync; }

void sync_gradients(c10::ArrayRef<at::Tensor> parameters) {
  for (const auto& parameter : parameters) {
    auto* impl = as_dtensor(parameter);
    auto& gradient = parameter.mutable_grad();
    LastMove last;
    if (impl && gradient.defined() && as_dtensor(gradient)) gradient = in_layout(gradient, impl->layout(), last, impl->module);
  }
  if (auto* world = detail::existing_world()) close_buckets(*world);
}

namespace {

void check_leaf(DTensorImpl* impl) {
  if (!impl->requires_grad()) return;
  impl->leaf_checked = true;
  const auto tensor = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(impl));
  // Not is_leaf(): of a view whose base was written it would work out the gradient function, which here, below autograd, is lost.
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (!meta || !meta->requires_grad_ || meta->grad_fn_) return;
  add_last_hook(tensor, std::make_unique<GradientHook>(tensor));
}

const bool leaves_have_hooks = [] {
  dispatch::check_leaf = check_leaf;
  return true;
}();

}  // namespace
}  // namespace dtensor
