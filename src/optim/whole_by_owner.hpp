// Work on whole tensors that lie in parts: each is gathered on one rank of its mesh, worked on there, and its result is laid out again.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace dtensor::optim {

struct OwnedWork {
  at::Tensor tensor;    // a DTensor, not Partial
  double cost = 1;      // by which the work is shared out
  at::Tensor result{};  // this rank's part, plain, in the sizes of its part of `tensor`
};

// Fills in the results of work on one mesh: function(i, whole) gives a plain tensor of whole's sizes, and runs on one rank for each i.
// Tensors are sent in `dtype`, which results have. Two all_to_alls, however many tensors there are; none on a mesh of one rank.
void work_on_whole(std::vector<OwnedWork>& work, at::ScalarType dtype, const std::function<at::Tensor(size_t i, const at::Tensor& whole)>& function);

// Which of `ranks` ranks each piece of work is for: the dearest first, to the rank that has the least. The same on all ranks.
std::vector<int64_t> share_out(const std::vector<double>& costs, int64_t ranks);

}  // namespace dtensor::optim
