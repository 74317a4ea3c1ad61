// R -> P(op): local values whose reduction is the whole. Nothing is communicated, except that norm2 asks whether a value is below zero.
//   sum, norm2       the first rank keeps the values, the others hold zeros
//   product          the first rank keeps the values, the others hold ones
//   avg, min, max    every rank keeps the values
#include "src/redistribute/transition.hpp"

#include <ATen/ops/any.h>
#include <ATen/ops/item.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <dtensor/base/error.hpp>

namespace dtensor::redistribute {

namespace {

// Ranks along other mesh dimensions may hold other shards, and all of them must throw.
void refuse_below_zero(const at::Tensor& local, const Layout& layout) {
  auto below = local.lt(0).any();
  std::vector<int64_t> dims;
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    if (!layout.placements()[m].is_replicate()) dims.push_back(m);
  }
  if (!dims.empty()) below = layout.mesh().communicator(dims).all_reduce(below.to(at::kLong), ReduceOp::max).get();
  require(!below.item<bool>(), "redistribute", "P(norm2) cannot hold numbers below 0; hint: redistribute the pending norm beside them");
}

}  // namespace

comm::Async to_partial(const at::Tensor& local, const Step& step) {
  const auto op = step.to.op;
  if (op == ReduceOp::norm2) refuse_below_zero(local, *step.before);
  const bool keeps = op == ReduceOp::avg || op == ReduceOp::min || op == ReduceOp::max;
  if (keeps || step.after->mesh().coordinate(step.mesh_dims.front()) == 0) return {local, {}};
  return {op == ReduceOp::product ? at::ones_like(local) : at::zeros_like(local), {}};
}

}  // namespace dtensor::redistribute
