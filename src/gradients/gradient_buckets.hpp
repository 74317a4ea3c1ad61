// Small gradients that are sums over the same ranks are reduced together: one message for many.
#pragma once

#include <dtensor/comm/communicator.hpp>
#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>

namespace dtensor {

// Whether a gradient of this part, whose sum is to be `target`, is one of those: small, and row-major as a whole. Says the same on every
// rank that has the sum: parts may lie in memory in another order on each.
bool fits_bucket(const at::Tensor& part, const Layout& target);

// The sum over `group` of what every rank has, as a distributed tensor of `target`, still under way: `part` is copied to a bucket, which is
// reduced when it is full, when the backward pass ends, or when somebody waits for one of its gradients before. All ranks of the group call
// it with the same sequence of sizes. Outside of a backward pass close_buckets() is to follow.
at::Tensor reduce_in_bucket(const at::Tensor& part, const LayoutPtr& target, comm::Communicator& group, ReduceOp op);
void close_buckets(World& world);

}  // namespace dtensor
