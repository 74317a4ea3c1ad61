// Operators as events, and the module that one is of: the named parameter that it reads says so.
#pragma once

#include "src/comm/event_log.hpp"
#include "src/dispatch/decision.hpp"

#include <memory>
#include <string_view>

namespace dtensor::dispatch {

inline bool operators_are_observed() { return comm::observers_of_operators.load(std::memory_order_relaxed) > 0; }

// From begin(), if it is called, to destruction. What is told goes to the observers of the mesh's rank.
class OperatorSpan {
 public:
  OperatorSpan() = default;
  ~OperatorSpan() {
    if (open_) [[unlikely]] end();
  }
  OperatorSpan(const OperatorSpan&) = delete;
  OperatorSpan& operator=(const OperatorSpan&) = delete;
  void begin(const DeviceMesh& mesh, std::string_view op, ModuleName module);
  // The same for a call as a boxed kernel gets it. Of a call without distributed operands nothing is told outside of Spmd.
  void begin(const c10::OperatorHandle& op, const Stack& stack, size_t begin);

 private:
  struct Open {
    comm::Event event;
    DeviceMesh mesh;
  };
  void end();
  std::unique_ptr<Open> open_;
};

inline std::string_view text_of(ModuleName module) { return module ? std::string_view(*module) : std::string_view(); }

// Of one operand; none, where it is no tensor or has no name. Of several it is the last's: weights come after activations.
template <class T>
ModuleName module_of(const T& value) {
  static_assert(!std::is_convertible_v<const T&, c10::ArrayRef<c10::IValue>>, "the module of IValues: module_of_arguments");
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (auto* impl = as_dtensor(value)) return impl->module;
  }
  return nullptr;
}
template <class... Args>
ModuleName module_of_operands(const Args&... args) {
  ModuleName found = nullptr;
  const auto take = [&](ModuleName module) { found = module ? module : found; };
  (take(module_of(args)), ...);
  return found;
}
// The same of a call as a boxed kernel gets it.
ModuleName module_of_arguments(c10::ArrayRef<c10::IValue> arguments);

// For which module a call communicates: the one of an operand that it moves, or else the one of an operand.
ModuleName module_of_moves(const Decision& decision, c10::ArrayRef<c10::IValue> arguments);

}  // namespace dtensor::dispatch
