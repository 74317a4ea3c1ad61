// S(d) -> R: every rank gets all shards and copies them to their places. No copy where d is the outermost dim of length above one:
// there the gathered list is the result.
#include "src/redistribute/transition.hpp"

namespace dtensor::redistribute {

comm::Async all_gather(const at::Tensor& local, const Step& step) {
  const int64_t dim = step.from.dim;
  const auto lengths = piece_lengths(*step.before, step.mesh_dims, dim);
  const auto sizes = step.after->local_sizes();
  auto gathered = group_of(step).all_gather(flat(local), piece_counts(sizes, dim, lengths));
  return unpack(std::move(gathered), sizes, dim, step.from.split, lengths);
}

}  // namespace dtensor::redistribute
