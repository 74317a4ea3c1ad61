// Hooks for the tensors that autograd saves for backward in this thread. libtorch has such hooks for Python only; in C++ the autograd
// engine provides them.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace dtensor::detail {

class SavedTensors {
 public:
  virtual ~SavedTensors() = default;
  // The hooks for the next tensor that is saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

// While it lives, autograd gets its hooks from `saved`; with null, libtorch saves as usual. Nests. Throws if another engine than libtorch's
// own runs backward.
class SaveWith {
 public:
  explicit SaveWith(SavedTensors* saved);
  ~SaveWith();
  SaveWith(const SaveWith&) = delete;
  SaveWith& operator=(const SaveWith&) = delete;

 private:
  SavedTensors* outer_;
};

}  // namespace dtensor::detail
