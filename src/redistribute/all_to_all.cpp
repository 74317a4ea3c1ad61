// S -> S': every rank sends to each other rank the elements that it has and the other one will hold.
#include "src/redistribute/transition.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>

namespace dtensor::redistribute {

namespace {

// S(d) -> S(e), e another dim: the pieces along e leave, pieces along d arrive.
comm::Async between_dims(const at::Tensor& local, const Step& step) {
  const int64_t leaves = step.to.dim, arrives = step.from.dim;
  const auto out = piece_lengths(*step.after, step.mesh_dims, leaves);
  const auto in = piece_lengths(*step.before, step.mesh_dims, arrives);
  const auto sizes = step.after->local_sizes();
  auto exchanged =
      group_of(step).all_to_all(pack(local, leaves, step.to.split, out), piece_counts(local.sizes(), leaves, out),
                                piece_counts(sizes, arrives, in));
  return unpack(std::move(exchanged), sizes, arrives, step.from.split, in);
}

// Which rank holds each index of a dim of this length.
std::vector<int32_t> owners(int64_t length, const Placement& placement, int64_t parts) {
  std::vector<int32_t> owner(length);
  for (int64_t rank = 0; rank < parts; ++rank) {
    for (const auto& part : cut(length, placement, parts, rank)) {
      std::fill(owner.begin() + part.begin, owner.begin() + part.end, static_cast<int32_t>(rank));
    }
  }
  return owner;
}

// This rank's indices (those of `mine`), by the rank that is their other end and then ascending: their local positions,
// and how many there are per rank.
struct Exchange {
  at::Tensor positions;
  std::vector<int64_t> lengths;
};

Exchange exchange(const std::vector<int32_t>& mine, int32_t rank, const std::vector<int32_t>& other_end,
                  int64_t parts) {
  std::vector<std::vector<int64_t>> by_rank(parts);
  int64_t local = 0;
  for (size_t index = 0; index < mine.size(); ++index) {
    if (mine[index] == rank) by_rank[other_end[index]].push_back(local++);
  }
  Exchange result{at::empty({local}, at::TensorOptions().dtype(at::kLong)), {}};
  auto* out = result.positions.data_ptr<int64_t>();
  for (const auto& positions : by_rank) {
    result.lengths.push_back(static_cast<int64_t>(positions.size()));
    out = std::ranges::copy(positions, out).out;
  }
  return result;
}

// S(d, split, unit) -> S(d, split', unit') of one dim: its indices go to other ranks. The lists that are sent have d outermost.
comm::Async within_dim(const at::Tensor& local, const Step& step) {
  const int64_t dim = step.from.dim, i = step.mesh_dims.front();
  const auto& mesh = step.before->mesh();
  const int64_t parts = mesh.sizes()[i];
  const int64_t length = step.before->local_sizes_before(i, mesh.coordinate())[dim];
  const auto rank = static_cast<int32_t>(mesh.coordinate(i));
  const auto old_owner = owners(length, step.from, parts), new_owner = owners(length, step.to, parts);
  const auto out = exchange(old_owner, rank, new_owner, parts), in = exchange(new_owner, rank, old_owner, parts);

  const auto device = local.device();
  const bool has_values = !local.is_meta();  // for which libtorch has no such kernels
  const auto in_front = local.movedim(dim, 0);
  const auto sent = has_values ? in_front.index_select(0, out.positions.to(device)) : at::empty(in_front.sizes(), local.options());
  auto received = group_of(step).all_to_all(flat(sent), piece_counts(sent.sizes(), 0, out.lengths),
                                            piece_counts(sent.sizes(), 0, in.lengths));
  auto result = at::empty(step.after->local_sizes(), local.options());
  auto rows = sent.sizes().vec();
  if (!has_values) return {result, received.work};
  rows[0] = in.positions.numel();
  const auto place = [=, list = received.tensor, positions = in.positions.to(device)] {
    result.movedim(dim, 0).index_copy_(0, positions, list.view(rows));
  };
  return then(received, result, place);
}

}  // namespace

comm::Async all_to_all(const at::Tensor& local, const Step& step) {
  return step.from.dim == step.to.dim ? within_dim(local, step) : between_dims(local, step);
}

}  // namespace dtensor::redistribute
