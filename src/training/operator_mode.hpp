// A mode that sees every operator that this thread calls, above autograd.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace c10 {
class OperatorHandle;
}

namespace dtensor::detail {

class OperatorMode {
 public:
  virtual ~OperatorMode() = default;
  // Takes the arguments off the stack and puts the results there. `below` are the keys of the kernels that would run.
  virtual void call(const c10::OperatorHandle& op, c10::DispatchKeySet below, c10::Stack* stack) = 0;
};

// While it lives, `mode` gets the calls of this thread; with null, no mode does. Nests.
class CallWith {
 public:
  explicit CallWith(OperatorMode* mode);
  ~CallWith();
  CallWith(const CallWith&) = delete;
  CallWith& operator=(const CallWith&) = delete;

 private:
  OperatorMode* outer_;
  bool outer_included_;
};

}  // namespace dtensor::detail
