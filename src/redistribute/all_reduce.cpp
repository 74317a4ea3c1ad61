// P(op) -> R: every rank gets the reduction of the ranks' values.
#include "src/redistribute/transition.hpp"

namespace dtensor::redistribute {

comm::Async all_reduce(const at::Tensor& local, const Step& step) {
  const auto op = step.from.op;
  auto reduced = group_of(step).all_reduce(flat(before_reduction(local, op)), wire_op(op));
  reduced.tensor = reduced.tensor.view(local.sizes());
  return after_reduction(std::move(reduced), op);
}

}  // namespace dtensor::redistribute
