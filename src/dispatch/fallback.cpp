// Every ATen operator on a DTensor, and every factory inside Spmd, arrives here: one boxed fallback below autograd.
//
// Hit: the call's key finds a decision; distributed arguments are replaced by their local parts, the operator runs, the results
// are wrapped. Miss: decide.cpp makes the decision from global metadata, the same on every rank.
#include "src/dispatch/cache.hpp"
#include "src/dispatch/decide.hpp"
#include "src/dispatch/execute.hpp"
#include "src/dispatch/guard.hpp"

#include <dtensor/spmd.hpp>

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

// The common case: tensors in, tensors out, nothing moves, the operator runs as it is.
void run_simple(const c10::OperatorHandle& op, Stack& stack, size_t begin, const Decision& decision) {
  const auto& info = *decision.info;
  c10::IValue self;
  std::shared_ptr<int> copied_view;
  const int64_t base_offset = info.is_view && stack[begin].isTensor() ? stack[begin].unsafeToTensorImpl()->storage_offset() : 0;
  if (!info.written.empty()) {
    check_writable(info, stack, begin);
    self = stack[begin + info.written[0]];
  }
  for (size_t i = begin; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (!value.isTensor()) continue;
    auto* impl = const_cast<c10::TensorImpl*>(value.unsafeToTensorImpl());
    if (!is_dtensor_impl(impl)) continue;
    auto* distributed = static_cast<DTensorImpl*>(impl);
    if (distributed->copied_view().use_count() > 1) [[unlikely]] copied_view = distributed->copied_view();
    value = c10::IValue(distributed->local());
  }
  {
    LocalMode local;
    op.callBoxed(&stack);
  }
  if (!info.written.empty()) {
    if (!info.returns_argument.empty()) stack[begin] = std::move(self);
    return;
  }
  for (size_t i = 0; i < decision.outputs.size(); ++i) {
    if (!decision.outputs[i]) continue;
    auto result = wrap(std::move(stack[begin + i]).toTensor(), decision.outputs[i]);
    if (info.is_view) {
      if (copied_view) [[unlikely]] as_dtensor(result)->set_copied_view(copied_view);
      set_view_offset(decision, i, base_offset, result);
    }
    stack[begin + i] = std::move(result);
  }
}

void run_miss(const c10::OperatorHandle& op, Stack& stack, size_t begin, const Key& key, uint64_t hash) {
  const auto& info = info_of(op);
  const bool distributed = any_tensor(stack, begin, true);
  if (!distributed && (any_tensor(stack, begin, false) || !Spmd::current() || !is_factory(info))) {
    return run_plain(op, stack);
  }
  auto decision = decide(op, info, c10::ArrayRef<c10::IValue>(stack).slice(begin));
  run_general(op, stack, begin, *decision);
  for (size_t i = 0; decision->simple && i < decision->outputs.size(); ++i) {  // a rule may have been wrong about the dtype
    auto& layout = decision->outputs[i];
    if (layout) layout = as_dtensor(stack[begin + i].toTensor())->layout();
  }
  if (info.rule == nullptr || !info.rule->data_dependent()) {
    DecisionCache::of_this_thread().insert(key, hash, std::move(decision));
  }
}

void fallback(const c10::OperatorHandle& op, c10::Stack* stack_pointer) {
  auto& stack = *stack_pointer;
  const auto& schema = op.schema();
  const size_t begin = stack.size() - schema.arguments().size();
  Key key;
  key.push(static_cast<const void*>(&schema));
  key.push(static_cast<const void*>(Spmd::current() ? Spmd::current()->id() : nullptr));
  for (size_t i = begin; i < stack.size(); ++i) key.push(stack[i]);
  const auto hash = key.hash();
  const auto decision = DecisionCache::of_this_thread().find(key, hash);
  if (!decision) return run_miss(op, stack, begin, key, hash);
  if ((*decision)->simple) [[likely]] return run_simple(op, stack, begin, **decision);
  const auto keep = *decision;
  run_general(op, stack, begin, *keep);
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  static_assert(kDTensorKey == c10::DispatchKey::Fake, "the library below is registered for this key");
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace dtensor::dispatch
