// P(op) -> S(d): every rank sends each other rank's shard of its values there, and reduces those that it gets, in rank order.
#include "src/redistribute/transition.hpp"

namespace dtensor::redistribute {

comm::Async reduce_scatter(const at::Tensor& local, const Step& step) {
  const auto op = step.from.op;
  const int64_t dim = step.to.dim;
  const auto lengths = piece_lengths(*step.after, step.mesh_dims, dim);
  const auto packed = pack(before_reduction(local, op), dim, step.to.split, lengths);
  auto reduced = group_of(step).reduce_scatter(packed, piece_counts(local.sizes(), dim, lengths), wire_op(op));
  reduced.tensor = reduced.tensor.view(step.after->local_sizes());
  return after_reduction(std::move(reduced), op, local.scalar_type());
}

}  // namespace dtensor::redistribute
