// AdamW in few passes over each parameter.
#pragma once

#include <torch/optim/adamw.h>

#pragma GCC visibility push(default)

namespace dtensor::optim {

// torch::optim::AdamW, with its options and its state. A step goes over each parameter a few times, where libtorch's calls a dozen
// operators for each: models of many small parameters take steps faster. Results differ from libtorch's by rounding, and have the same bits
// on any mesh. Communicates nothing.
//
// Where a parameter is not on the CPU, or of another dtype than float32 and float64, a gradient is sparse or not laid out as its parameter,
// or `amsgrad` is on, a step is libtorch's.
class FusedAdamW final : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace dtensor::optim

#pragma GCC visibility pop
