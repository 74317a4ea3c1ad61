// R -> S(d): every rank keeps its shard. Nothing is communicated. The shard is a view of the whole, unless a split makes it of several
// pieces.
#include "src/redistribute/transition.hpp"

#include <dtensor/mesh/alias.hpp>

namespace dtensor::redistribute {

comm::Async chunk(const at::Tensor& local, const Step& step) {
  const auto& p = step.to;
  const int64_t i = step.mesh_dims.front();
  const auto& mesh = step.after->mesh();
  const int64_t length = local.size(p.dim);
  const auto parts = cut(length, p, mesh.sizes()[i], mesh.coordinate(i));
  if (parts.empty()) return {detail::narrow(local, p.dim, 0, 0), {}};
  if (parts.size() == 1) return {detail::narrow(local, p.dim, parts[0].begin, parts[0].length()), {}};
  auto sizes = local.sizes().vec();
  sizes[p.dim] = length / p.split;
  sizes.insert(sizes.begin() + p.dim, p.split);
  const auto inner = local.view(sizes).narrow(p.dim + 1, parts[0].begin, parts[0].length());
  return {inner.reshape(step.after->local_sizes()), {}};
}

}  // namespace dtensor::redistribute
