// Hooks for the tensors that autograd saves for a backward pass: keep a copy on the host, a rounded one, or only what it takes to compute
// the tensor again. <dtensor/dtensor.hpp> does not include this header.
//
//   struct OnHost : dt::SavedTensors {
//     struct Hooks : torch::autograd::SavedVariableHooks {
//       void call_pack_hook(const at::Tensor& tensor) override { kept = tensor.to(at::kCPU); }        // autograd saves `tensor`
//       at::Tensor call_unpack_hook() override { return kept.to(at::kCUDA); }                         // backward needs it
//       at::Tensor kept;
//     };
//     std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(); }
//   } on_host;
//   {
//     dt::SaveWith save(&on_host);
//     loss = model->forward(x);    // what this saves is kept on the host
//   }
//   loss.backward();
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

#pragma GCC visibility push(default)

namespace dtensor {

// Makes the hooks. Each tensor that autograd saves gets hooks of its own:
//
// - call_pack_hook(tensor) runs when autograd saves the tensor. Autograd then keeps the hooks, and not the tensor: what the hooks do not
//   keep is freed.
// - call_unpack_hook() runs when the backward pass needs the tensor, on the thread of that pass. It returns a tensor of the same sizes and
//   dtype.
class SavedTensors {
 public:
  virtual ~SavedTensors() = default;
  // The hooks of the tensor that is saved next. Null: autograd saves that tensor itself, as without hooks.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

// From construction to destruction, the tensors that autograd saves on this thread get the hooks that `saved` makes. `saved` has to live as
// long as this. With a null pointer autograd saves tensors itself: that turns the hooks of a SaveWith around this one off. Of several the
// innermost counts. Communicates nothing. Throws where another autograd engine than libtorch's own runs backward passes, as in a Python
// process.
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
