// A backward pass in two halves: first the gradients of the inputs (I), which the stage before is waiting for, and whenever there is time
// the gradients of the parameters (W). Zero-bubble pipeline schedules fill idle time with W.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// What is left of a backward pass after I. The parameters' gradients are undefined, or as they were, until run() adds to them.
class WeightBackward {
 public:
  WeightBackward();
  WeightBackward(WeightBackward&&) noexcept;
  WeightBackward& operator=(WeightBackward&&) noexcept;
  ~WeightBackward();

  // W: adds the parameters' gradients to their .grad, as backward() does: hooks of leaves, gradient buckets and units of fully sharded
  // parameters see it as usual, once. Frees the graph. Communicates what these do. Does nothing the second time.
  void run();

  // Whether there is anything left to run.
  bool empty() const;

 private:
  struct Rest;
  friend class GraphOutputs;
  std::unique_ptr<Rest> rest_;
};

struct InputBackward {
  std::vector<at::Tensor> gradients;  // one per input; undefined where an input needs none or the outputs do not depend on it
  WeightBackward weights;
};

// I: the gradients of `inputs`, given those of `outputs`. An input's .grad is not written. What only this half needed is freed: of the
// graph there remain the nodes that the parameters' gradients come from.
//
//   auto [gradients, weights] = dt::backward_inputs({y}, {gradient_of_y}, {x});
//   send(gradients[0]);
//   ...
//   weights.run();
//
// Both halves together give the bits of torch::autograd::backward. A hook of a tensor that is no leaf (Tensor::register_hook) runs once, in
// whichever half comes to it first; hooks of leaves run in W. A custom torch::autograd::Function whose gradient of its inputs and of
// parameters is one function computes it in both halves, and so does an operator of libtorch whose two gradients are one kernel.
// A dt::checkpoint region runs again once, in I, and what W needs of it stays until then.
//
// outputs    tensors of the graph; each must require a gradient
// gradients  one per output, with its sizes; an undefined one stands for 1 if the output has one element
// inputs     leaves that the outputs were computed from. Without one that needs a gradient all is left to W (the first stage of a pipeline)
//
// Throws if an output needs no gradient or has other sizes than its gradient, and if an input is no leaf. (The split is the one of Qi et
// al., "Zero Bubble Pipeline Parallelism", 2023.)
InputBackward backward_inputs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients,
                              const std::vector<at::Tensor>& inputs);

// Outputs of which only the graph is kept, so that their values may be freed: a stage has sent them.
class GraphOutputs {
 public:
  // Throws if one needs no gradient.
  explicit GraphOutputs(const std::vector<at::Tensor>& outputs);
  ~GraphOutputs();
  GraphOutputs(GraphOutputs&&) noexcept;
  GraphOutputs& operator=(GraphOutputs&&) noexcept;

  // Each ends the graph, and is called once. `gradients` and `inputs` are as in dt::backward_inputs.
  InputBackward backward_inputs(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& inputs) &&;
  void backward(const std::vector<at::Tensor>& gradients) &&;

  // Leaves out the outputs whose gradient is undefined, and these: nothing came from there. How many are left.
  size_t leave_out_missing(std::vector<at::Tensor>& gradients);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dtensor

#pragma GCC visibility pop
