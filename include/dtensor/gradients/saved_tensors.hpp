// What becomes of the tensors that autograd saves for a backward pass. libtorch has such hooks for Python; in C++ they are the engine's to
// give.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

#pragma GCC visibility push(default)

namespace dtensor {

// Gives the hooks, one for each tensor that is saved: its call_pack_hook(tensor) runs when the tensor is saved, call_unpack_hook() when the
// backward pass needs it, on the thread of the backward pass, and gives a tensor of the same sizes and dtype. What the hook keeps in
// between is all that is kept: a copy on the host, a rounded one, or what it takes to compute the tensor again.
class SavedTensors {
 public:
  virtual ~SavedTensors() = default;
  // For the next tensor that is saved. Null: it is saved as ever.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

// While it lives, in this thread, `saved` is asked; null: libtorch saves as ever. Nests, the innermost has the say. Communicates nothing.
// Throws where another engine than libtorch's own runs backward, as in a Python process.
class SaveWith {
 public:
  explicit SaveWith(SavedTensors* saved);
  ~SaveWith();
  SaveWith(const SaveWith&) = delete;
  SaveWith& operator=(const SaveWith&) = delete;

 private:
  SavedTensors* outer_;
};

}  // namespace dtensor

#pragma GCC visibility pop
