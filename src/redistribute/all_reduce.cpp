// P(op) -> R: every rank gets the reduction of all local values.
#include "src/redistribute/transition.hpp"

namespace dtensor::redistribute {

comm::Async all_reduce(const at::Tensor& local, const Step& step) {
  const auto op = step.from.op;
  return after_reduction(group_of(step).all_reduce(dense(before_reduction(local, op)), wire_op(op)), op, local.scalar_type());
}

}  // namespace dtensor::redistribute
