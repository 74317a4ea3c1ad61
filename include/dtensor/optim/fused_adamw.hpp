// AdamW in one operator for all parameters.
#pragma once

#include <torch/optim/adamw.h>

#pragma GCC visibility push(default)

namespace dtensor::optim {

// torch::optim::AdamW, with its options and its state. Where libtorch has the operator (2.4 and later), a step calls it once for a group of
// parameters, in place of a dozen operators for each of them: models of many small parameters take steps faster. Results differ from
// torch::optim::AdamW's by rounding, and are the same on any mesh. Communicates nothing.
//
// Where a gradient is sparse or not laid out as its parameter, parameters of a group differ in dtype or device, or `amsgrad` is on, a step
// is torch::optim::AdamW's.
class FusedAdamW final : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace dtensor::optim

#pragma GCC visibility pop
