#include "ops/view_dims.hpp"

#include <dtensor/mesh/alias.hpp>

#include <algorithm>
#include <limits>
#include <numeric>

namespace dtensor::rules {

namespace {

bool passes(Passes which, const Placement& p) {
  if (which == Passes::all) return true;
  return which == Passes::sums && (p.is_partial(ReduceOp::sum) || p.is_partial(ReduceOp::avg));
}

// The candidate in which the operand is cut as `p`, if every output can follow.
std::optional<Candidate> follow(const Placement& p, const std::vector<DimMap>& maps, int64_t parts) {
  Candidate candidate{{p}, {}};
  for (const auto& map : maps) {
    const auto next = carry(p, map[p.dim]);
    if (!next && parts > 1) return {};
    candidate.out.push_back(next ? *next : replicate());  // one part is the whole
  }
  return candidate;
}

// The fewest blocks of a sliced dim such that every slice is made of whole blocks; 1 for a dim that is not sliced.
int64_t blocks_of(int64_t dim, const std::vector<DimMap>& maps) {
  int64_t whole = 0, block = 0;
  for (const auto& map : maps) {
    const auto& image = map[dim];
    if (image.embeds || !image.slices()) continue;
    whole = image.whole;
    block = std::gcd(std::gcd(block, image.whole), std::gcd(image.begin, image.end));
  }
  return block == 0 ? 1 : whole / block;
}

// Whether the result is one tensor, no list and no single number, with the elements of the operand in another order of dims at most.
bool keeps_all(const std::vector<DimMap>& maps, const Call& call) {
  const bool list = call.schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
  return !list && maps.size() == 1 && !call.outputs[0].sizes.empty() && maps[0].size() == call.outputs[0].sizes.size() &&
         std::ranges::all_of(maps[0], [](const Image& image) { return image.dim >= 0 && !image.slices(); });
}

}  // namespace

std::optional<Placement> carry(const Placement& p, const Image& image) {
  if (image.dim < 0) return {};
  if (!image.slices()) return shard(image.dim, p.cut());
  const int64_t part = image.end - image.begin;
  if (part == 0) return image.embeds ? std::optional<Placement>() : shard(image.dim);
  // A slice keeps whole blocks: with `split` blocks in the whole, its bounds must fall between blocks.
  if (image.embeds && p.split * image.whole % part != 0) return {};
  const int64_t split = image.embeds ? p.split * image.whole / part : p.split;
  if (split * image.begin % image.whole != 0 || split * image.end % image.whole != 0) return {};
  const int64_t result = image.embeds ? split : split * part / image.whole;
  if (result > std::numeric_limits<int32_t>::max()) return {};
  return shard(image.dim, Cut{static_cast<int32_t>(result), p.unit, p.shares});
}

DimMap same_dims(int64_t ndim) { return without_dims(ndim, {}); }

DimMap without_dims(int64_t ndim, c10::ArrayRef<int64_t> dropped) {
  DimMap map(ndim);
  int64_t next = 0;
  for (int64_t d = 0; d < ndim; ++d) {
    if (std::ranges::find(dropped, d) == dropped.end()) map[d].dim = next++;
  }
  return map;
}

Lowering with_arguments(Changes changes) {
  return [changes = std::move(changes)](LocalCall& call) {
    for (const auto& [index, value] : changes) call.arg(index) = value;
    call.call();
  };
}

Sizes local_output_sizes(const Call& call, const Resolution& resolution, size_t i) {
  const auto& meta = call.outputs[i];
  const auto layout = Layout::get(call.mesh, resolution.out[i], meta.sizes, meta.strides, meta.dtype);
  return Sizes(layout->local_sizes().begin(), layout->local_sizes().end());
}

Candidates DimRule::candidates(const Call& call, int64_t mesh_dim) const {
  if (call.operands.size() != 1 || call.outputs.empty()) return {};
  const auto& now = call.chosen[0][mesh_dim];
  Candidates result;
  if (now.is_partial() && passes(passes_, now)) {
    result.push_back({{now}, Placements(call.outputs.size(), now)});
  }
  const auto maps = maps_(call);
  const auto parts = call.mesh.size(mesh_dim);
  auto offer = [&](const Placement& p) {
    if (auto candidate = follow(p, maps, parts)) result.push_back(std::move(*candidate));
  };
  if (now.is_flat() && passes_ == Passes::all && keeps_all(maps, call)) result.push_back({{now}, {now}});
  if (now.is_shard()) offer(now);
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    if (now != shard(d)) offer(shard(d));
    const auto blocks = blocks_of(d, maps);
    if (blocks > 1 && call.operands[0].sizes()[d] / blocks >= parts && now != strided_shard(d, blocks)) {
      offer(strided_shard(d, blocks));
    }
  }
  return result;
}

Lowering flat_view(const Call& call, const Resolution& resolution) {
  const bool copies = call.schema.name().ends_with("_copy");
  return [copies, sizes = local_output_sizes(call, resolution, 0)](LocalCall& local) {
    const auto source = local.arg(0).toTensor();
    auto view = detail::alias(source, sizes, contiguous_strides(sizes), source.storage_offset());
    local.replace({copies ? view.clone() : view});
  };
}

Lowering DimRule::lower(const Call& call, const Resolution& resolution) const {
  if (resolution.in[0]->is_flat() && passes_ == Passes::all && !call.outputs.empty()) return flat_view(call, resolution);
  return lower_ && !call.outputs.empty() ? lower_(call, resolution) : Lowering();
}

std::vector<Sizes> DimRule::output_sizes(const Call& call) const {
  return output_sizes_ ? output_sizes_(call) : std::vector<Sizes>();
}

}  // namespace dtensor::rules
