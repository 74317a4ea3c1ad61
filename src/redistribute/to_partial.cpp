// R -> P(op): values whose reduction is the whole. Nothing is communicated.
//   sum, norm2       the first rank keeps the values, the others hold zeros
//   product          the first rank keeps the values, the others hold ones
//   avg, min, max    every rank keeps the values
#include "src/redistribute/transition.hpp"

#include <ATen/ops/any.h>
#include <ATen/ops/item.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <dtensor/error.hpp>

namespace dtensor::redistribute {

comm::Async to_partial(const at::Tensor& local, const Step& step) {
  const auto op = step.to.op;
  if (op == ReduceOp::norm2) {
    require(!local.lt(0).any().item<bool>(), "redistribute",
            "P(norm2) cannot hold numbers below 0; hint: redistribute the pending norm beside them");
  }
  const bool keeps = op == ReduceOp::avg || op == ReduceOp::min || op == ReduceOp::max;
  if (keeps || step.after->mesh().coordinate(step.mesh_dims.front()) == 0) return {local, {}};
  return {op == ReduceOp::product ? at::ones_like(local) : at::zeros_like(local), {}};
}

}  // namespace dtensor::redistribute
