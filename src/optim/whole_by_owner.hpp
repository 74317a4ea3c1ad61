// Work that needs whole tensors, for tensors that are sharded: gathers each tensor on one rank of its mesh (its owner), works on it there,
// and sends the shards of the result back.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace dtensor::optim {

struct OwnedWork {
  at::Tensor tensor;    // a DTensor, not Partial
  double cost = 1;      // divides the work among the ranks
  at::Tensor result{};  // this rank's shard, plain, of the sizes of its shard of `tensor`
};

// Fills in the results of work on one mesh. function(i, whole) returns a plain tensor of the sizes of `whole`; it runs on one rank for each
// i. Tensors are sent in `dtype`, and results have it. Communicates two all_to_alls, however many tensors there are; none on a mesh of one
// rank.
void work_on_whole(std::vector<OwnedWork>& work, at::ScalarType dtype,
                   const std::function<at::Tensor(size_t i, const at::Tensor& whole)>& function);

// Which of `ranks` ranks does each piece of work. The most expensive piece is assigned first, each to the rank that has the least work so
// far. The same on all ranks.
std::vector<int64_t> share_out(const std::vector<double>& costs, int64_t ranks);

}  // namespace dtensor::optim
