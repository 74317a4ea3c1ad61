// Every ATen operator on a DTensor, and every factory inside Spmd, arrives here: one boxed fallback below autograd.
//
// Hit: the call's key finds a decision; distributed arguments are replaced by their local tensors, the operator runs, and the results are
// wrapped. Miss: decide.cpp makes the decision from global metadata, the same on every rank.
#include "src/dispatch/fallback.hpp"

#include "src/dispatch/absent.hpp"
#include "src/dispatch/decide.hpp"
#include "src/dispatch/deferred.hpp"
#include "src/dispatch/execute.hpp"
#include "src/dispatch/failure.hpp"
#include "src/dispatch/operator_event.hpp"
#include "src/dispatch/out_form.hpp"
#include "src/dispatch/region.hpp"
#include "src/dispatch/write_through.hpp"
#include "src/mesh/stand_in.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>

#include <torch/library.h>

#include <optional>

namespace dtensor::dispatch {

namespace {

bool any_distributed(const Stack& stack, size_t begin) { return any_tensor(arguments(stack, begin), as_dtensor); }
bool any_defined(const Stack& stack, size_t begin) { return any_tensor(arguments(stack, begin), [](const at::Tensor&) { return true; }); }

// Local tensors stand for the distributed ones among the arguments; false where one of them has no values.
bool take_locals(Stack& stack, size_t begin) {
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
  return has_values;
}

using Originals = c10::SmallVector<c10::IValue, 6>;

// Asked for where a local call communicates.
std::string_view module_of_call(const void* originals) { return text_of(module_of_arguments(*static_cast<const Originals*>(originals))); }

// The common case: tensors in, tensors out, nothing moves.
void run_simple(const c10::OperatorHandle& op, Stack& stack, size_t begin, const Decision& decision) try {
  const auto& info = *decision.info;
  Originals originals;
  c10::IValue self, base;  // what the operator returns; what it views or casts
  ModuleName module = nullptr;
  if (decision.gives_pending) [[unlikely]] module = module_of_arguments(arguments(stack, begin));
  if (decision.lowering) originals.append(stack.begin() + static_cast<int64_t>(begin), stack.end());
  if (info.is_view || decision.casts) base = stack[begin];
  std::vector<Written> written;
  if (!info.written.empty()) {
    written = begin_writes(info, arguments(stack, begin));
    self = stack[begin + info.written[0]];
  }
  const bool has_values = take_locals(stack, begin);
  if (!info.written.empty() && stack.size() > begin + 1) {
    LocalMode local;
    separate_overlapping(info, stack, begin);
  }
  if (!has_values) [[unlikely]] {
    LocalMode local;
    rules::LocalCall call{op, stack, begin, originals};
    if (decision.mesh.contains_this_rank() || !skip_draws(decision, call)) run_without_values(op, info, stack, begin, decision);
  } else if (decision.lowering) {
    comm::Cause cause(info.name, true, module_of_call, &originals);
    LocalMode local;
    rules::LocalCall call{op, stack, begin, originals};
    decision.lowering(call);
  } else {
    LocalMode local;
    op.callBoxed(&stack);
  }
  if (!written.empty()) [[unlikely]] {
    comm::Cause cause(info.name, true, text_of(module));
    carry_over(written);
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
    finish_result(decision, i, base.isTensor() ? base.unsafeToTensorImpl() : nullptr, module, result);
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
  const bool deferred = any_tensor(arguments(stack, begin), is_deferred);
  require(!deferred || Recorder::current(), info.name,
          "the values of an operand are not there yet: it was made under dt::DeferredInit; hint: call dt::materialize on its module first, "
          "or initialize it inside the region");
  return Recorder::current() && (deferred || !any_distributed(stack, begin));
}

void run_miss(const c10::OperatorHandle& op, Stack& stack, size_t begin, Key& key) {
  const auto& info = info_of(op);
  std::optional<dtensor::detail::StandIn> stand_in;
  if (is_worked_out(info, stack, begin)) stand_in.emplace();
  if (info.becomes && is_dtensor_impl(stack[begin].unsafeToTensorImpl())) return become_view(*info.becomes, stack, begin);
  const bool distributed = any_distributed(stack, begin);
  if (info.changes_metadata && distributed && change_metadata(op, stack, begin)) return;
  if (!distributed && (any_defined(stack, begin) || !current_mesh || info.has_tensor_argument || !is_factory(info) ||
                       is_made_elsewhere(info, stack, begin, *current_mesh))) {
    return run_plain(op, stack);
  }
  // In InferenceMode nothing above has taken composites apart.
  if (distributed && !info.rule && c10::InferenceMode::is_enabled() &&
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
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
