// Flat -> R, P(op) -> Flat and R -> Flat. The elements of the local tensor, in memory order, are a row; a flat layout cuts it.
#include "src/redistribute/transition.hpp"

#include <dtensor/mesh/alias.hpp>

#include <dtensor/redistribute/elements.hpp>

#include <algorithm>

namespace dtensor::redistribute {

namespace {

// The memory order of a tensor's elements, by the strides of `layout`.
struct MemoryOrder {
  explicit MemoryOrder(const Layout& layout)
      : order(memory_order(layout.strides())), sizes(layout.local_sizes_before(layout.mesh().ndim(), layout.mesh().coordinate())) {}

  at::Tensor flatten(const at::Tensor& tensor) const { return flat(tensor.permute(order)); }

  at::Tensor unflatten(const at::Tensor& elements) const {
    Sizes strides(sizes.size());
    int64_t step = 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = step;
      step *= std::max<int64_t>(sizes[order[i]], 1);
    }
    return detail::alias(elements, sizes, strides, elements.storage_offset());
  }

  Sizes order, sizes;
};

// Elements of each rank of the step's mesh dimension.
std::vector<int64_t> counts_of(const Layout& layout) {
  auto coordinate = layout.mesh().coordinate().vec();
  const auto m = layout.flat_dim();
  std::vector<int64_t> counts;
  for (coordinate[m] = 0; coordinate[m] < layout.mesh().size(m); ++coordinate[m]) counts.push_back(layout.flat_shard(coordinate).length());
  return counts;
}

at::Tensor as_shard(const at::Tensor& elements, const Layout& layout) { return elements.view(layout.local_sizes()); }

}  // namespace

comm::Async flat_all_gather(const at::Tensor& local, const Step& step) {
  const MemoryOrder order(*step.before);
  auto gathered = group_of(step).all_gather(flat(local), counts_of(*step.before));
  gathered.tensor = order.unflatten(gathered.tensor);
  return gathered;
}

comm::Async flat_reduce_scatter(const at::Tensor& local, const Step& step) {
  const auto op = step.from.op;
  const auto elements = MemoryOrder(*step.after).flatten(before_reduction(local, op));
  auto reduced = group_of(step).reduce_scatter(elements, counts_of(*step.after), wire_op(op));
  reduced.tensor = as_shard(reduced.tensor, *step.after);
  return after_reduction(std::move(reduced), op, local.scalar_type());
}

comm::Async flat_chunk(const at::Tensor& local, const Step& step) {
  const auto part = step.after->flat_shard(step.after->mesh().coordinate());
  return {as_shard(MemoryOrder(*step.after).flatten(local).narrow(0, part.begin, part.length()), *step.after), {}};
}

comm::Async flat_of_one(const at::Tensor& local, const Step& step) {
  if (!step.to.is_flat()) return {MemoryOrder(*step.before).unflatten(flat(local)), {}};
  return step.from.is_flat() ? comm::Async{local, {}} : flat_chunk(local, step);
}

}  // namespace dtensor::redistribute

at::Tensor dtensor::from_elements(const at::Tensor& elements, const Layout& layout) {
  return redistribute::MemoryOrder(layout).unflatten(elements);
}
