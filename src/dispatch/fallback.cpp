// Every ATen operator on a DTensor, and every factory inside Spmd, arrives here: one boxed fallback below autograd.
//
// Hit: the call's key finds a decision; distributed arguments are replaced by their local parts, the operator runs, the results
// are wrapped. Miss: decide.cpp makes the decision from global metadata, the same on every rank.
#include "src/dispatch/fallback.hpp"

#include "src/dispatch/decide.hpp"
#include "src/dispatch/deferred.hpp"
#include "src/dispatch/execute.hpp"
#include "src/dispatch/failure.hpp"
#include "src/dispatch/operator_event.hpp"
#include "src/dispatch/out_form.hpp"
#include "src/dispatch/region.hpp"
#include "src/dispatch/write_through.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>

#include <torch/library.h>

namespace dtensor::dispatch {

namespace {

bool any_tensor(const c10::IValue& value, bool distributed) {
  if (value.isTensor()) {
    const auto* impl = value.unsafeToTensorImpl();
    return distributed ? is_dtensor_impl(impl) : impl != c10::UndefinedTensorImpl::singleton();
  }
  if (!value.isList()) return false;
  for (const auto& element : value.toListRef()) {
    if (any_tensor(element, distributed)) return true;
  }
  return false;
}

bool any_tensor(const Stack& stack, size_t begin, bool distributed) {
  for (size_t i = begin; i < stack.size(); ++i) {
    if (any_tensor(stack[i], distributed)) return true;
  }
  return false;
}

// The common case: tensors in, tensors out, nothing moves.
void run_simple(const c10::OperatorHandle& op, Stack& stack, size_t begin, const Decision& decision) try {
  const auto& info = *decision.info;
  c10::SmallVector<c10::IValue, 6> originals;
  c10::IValue self;
  const int64_t base_bytes = info.is_view && stack[begin].isTensor() ? offset_in_bytes(*stack[begin].unsafeToTensorImpl()) : 0;
  FlatMemberPtr member;
  bool pinned = false;
  c10::DispatchKeySet keys;
  ModuleName module = nullptr;
  if (decision.gives_pending) [[unlikely]] module = module_of_operands(c10::ArrayRef<c10::IValue>(stack).slice(begin));
  if (info.is_view && stack[begin].isTensor()) {
    if (const auto* base = as_dtensor(stack[begin].toTensor())) member = base->member(), pinned = base->pinned, keys = base->key_set(), module = base->module;
  }
  if (decision.lowering || decision.casts) originals.append(stack.begin() + static_cast<int64_t>(begin), stack.end());
  std::vector<Written> written;
  if (!info.written.empty()) {
    written = written_beside(info, stack, begin);
    note_written(info, c10::ArrayRef<c10::IValue>(stack).slice(begin));
    self = stack[begin + info.written[0]];
  }
  bool has_values = true;
  for (size_t i = begin; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (!value.isTensor()) continue;
    auto* impl = const_cast<c10::TensorImpl*>(value.unsafeToTensorImpl());
    if (!is_dtensor_impl(impl)) continue;
    const auto& local = static_cast<DTensorImpl*>(impl)->local();
    has_values &= !local.is_meta();
    value = c10::IValue(local);
  }
  if (!info.written.empty() && stack.size() > begin + 1) {
    LocalMode local;
    part_overlapping(info, stack, begin);
  }
  if (!has_values) [[unlikely]] {
    LocalMode local;
    run_without_values(op, info, stack, begin, decision);
  } else if (decision.lowering) {
    comm::Cause cause(info.name, true, text_of(module_of_operands(originals)));
    LocalMode local;
    rules::LocalCall call{op, stack, begin, originals};
    decision.lowering(call);
  } else {
    LocalMode local;
    op.callBoxed(&stack);
  }
  if (!written.empty()) [[unlikely]] {
    comm::Cause cause(info.name, true, text_of(module));
    write_through(written);
  }
  if (!info.makes_results) {
    if (!info.returns_argument.empty()) stack[begin] = std::move(self);
    return;
  }
  for (size_t i = 0; i < decision.outputs.size(); ++i) {
    if (!decision.outputs[i]) continue;
    auto local = std::move(stack[begin + i]).toTensor();
    if (decision.reorders()) local = in_reported_order(std::move(local), *decision.outputs[i]->layout());
    auto result = wrap(std::move(local), *decision.outputs[i]);
    if (info.is_view) {
      set_view_offset(decision, i, base_bytes / static_cast<int64_t>(result.dtype().itemsize()), result);
      if (decision.lowering) part_copied_view(decision, originals[0], result);
      as_dtensor(result)->set_member(member);
      as_dtensor(result)->pinned = pinned;
      as_dtensor(result)->module = module;
      as_dtensor(result)->track_as(keys);
    }
    if (decision.casts) inherit(decision, originals[0], result);
    if (decision.gives_pending) [[unlikely]] as_dtensor(result)->module = module;
    stack[begin + i] = std::move(result);
  }
} catch (...) {
  rethrow_failure(decision);
}

void remember(Key& key, std::shared_ptr<const Decision> decision) {
  auto& cache = DecisionCache::of_this_thread();
  const auto* rule = decision->info->rule;
  if (decision->once || (rule && rule->data_dependent())) return;
  if (key.has_numbers() && (!rule || rule->reads_numbers())) {
    auto by_numbers = std::make_shared<Decision>(Decision{decision->info, decision->mesh});
    by_numbers->reads_numbers = true;
    cache.insert(key, key.hash(), std::move(by_numbers));
    key.add_numbers();
  }
  cache.insert(key, key.hash(), std::move(decision));
}

// squeeze_, t_, ...: the tensor takes the place of the view that the operator's other form gives.
void become_view(const c10::OperatorHandle& view, Stack& stack, size_t begin) {
  const auto self = stack[begin].toTensor();
  view.callBoxed(&stack);
  self.unsafeGetTensorImpl()->shallow_copy_from(stack[begin].toTensor().getIntrusivePtr());
  stack[begin] = self;
}

// Whether the call makes a tensor that is to be deferred, or has such operands.
bool records(const OpInfo& info, const Stack& stack, size_t begin) {
  const auto has_deferred = [](const auto& self, const c10::IValue& value) -> bool {
    if (value.isTensor()) return value.toTensor().defined() && is_deferred(value.toTensor());
    if (!value.isList()) return false;
    const auto elements = value.toListRef();
    return std::any_of(elements.begin(), elements.end(), [&](const c10::IValue& element) { return self(self, element); });
  };
  bool deferred = false;
  for (size_t i = begin; i < stack.size(); ++i) deferred |= has_deferred(has_deferred, stack[i]);
  require(!deferred || Recorder::current(), info.name,
          "the values of an operand are not there yet: it was made under dt::DeferredInit; hint: call dt::materialize on its module first, "
          "or initialize it inside the region");
  return Recorder::current() && (deferred || !any_tensor(stack, begin, true));
}

void run_miss(const c10::OperatorHandle& op, Stack& stack, size_t begin, Key& key) {
  const auto& info = info_of(op);
  if (info.becomes && is_dtensor_impl(stack[begin].unsafeToTensorImpl())) return become_view(*info.becomes, stack, begin);
  const bool distributed = any_tensor(stack, begin, true);
  if (info.changes_metadata && distributed && change_metadata(op, stack, begin)) return;
  if (!distributed && (any_tensor(stack, begin, false) || !current_mesh || info.has_tensor_argument || !is_factory(info) ||
                       is_made_elsewhere(info, stack, begin, *current_mesh))) {
    return run_plain(op, stack);
  }
  // In InferenceMode nothing above has taken composites apart.
  if (distributed && !info.rule && c10::InferenceMode::is_enabled() && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), &stack);
  }
  if (has_functional(info)) return run_out_form(info, stack, begin);
  if (records(info, stack, begin)) {
    const auto recorder = Recorder::current()->shared_from_this();  // another thread may end its region meanwhile
    return recorder->record(op, info, stack, begin);
  }
  if (distributed && draw_out_form(info, stack, begin)) return;
  auto decision = decide(op, info, c10::ArrayRef<c10::IValue>(stack).slice(begin));
  info.decided = true;
  run_general(op, stack, begin, *decision);
  for (size_t i = 0; decision->simple && i < decision->outputs.size(); ++i) {  // a rule may have been wrong about the dtype
    auto& output = decision->outputs[i];
    if (!output) continue;
    const auto& layout = as_dtensor(stack[begin + i].toTensor())->layout();
    if (layout != output->layout()) output = c10::make_intrusive<DTensorImpl>(layout);
  }
  remember(key, std::move(decision));
}

}  // namespace

void fallback(const c10::OperatorHandle& op, c10::Stack* stack_pointer) {
  auto& stack = *stack_pointer;
  const size_t begin = stack.size() - op.schema().arguments().size();
  OperatorSpan span;
  if (operators_are_observed()) [[unlikely]] span.begin(op, stack, begin);
  Key key;
  begin_key(key, op);
  for (size_t i = begin; i < stack.size(); ++i) key.push(stack[i]);
  const auto* decision = find_decision(key);
  if (!decision) return run_miss(op, stack, begin, key);
  if ((*decision)->simple && (*decision)->moves.empty()) [[likely]]
    return run_simple(op, stack, begin, **decision);
  const auto keep = *decision;
  run_general(op, stack, begin, *keep);
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  static_assert(kDTensorKey == c10::DispatchKey::Fake, "the library below is registered for this key");
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace dtensor::dispatch
