#include "src/training/operator_mode.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace dtensor::detail {

namespace {

// Above autograd, beside the mode of generators (rng/rank_generator.cpp), and like it not used by libtorch.
constexpr c10::DispatchKey kOperatorModeKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

thread_local OperatorMode* current = nullptr;

void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kOperatorModeKey);
  if (current) return current->call(op, below, stack);
  op.redispatchBoxed(below, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  static_assert(kOperatorModeKey == c10::DispatchKey::TESTING_ONLY_GenericWrapper, "the library below is registered for this key");
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
}

}  // namespace

CallWith::CallWith(OperatorMode* mode) : outer_(current), outer_included_(c10::impl::tls_is_dispatch_key_included(kOperatorModeKey)) {
  current = mode;
  c10::impl::tls_set_dispatch_key_included(kOperatorModeKey, mode != nullptr);
}

CallWith::~CallWith() {
  current = outer_;
  c10::impl::tls_set_dispatch_key_included(kOperatorModeKey, outer_included_);
}

}  // namespace dtensor::detail
