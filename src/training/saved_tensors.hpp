// Says what becomes of the tensors that autograd saves for backward in this thread. libtorch has such hooks for Python; in C++ they are
// the engine's to give.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace dtensor::detail {

class SavedTensors {
 public:
  virtual ~SavedTensors() = default;
  // For the next tensor that is saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

// While it lives, `saved` is asked; null: libtorch saves as ever. Nests. Throws where another engine than libtorch's own runs backward.
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
