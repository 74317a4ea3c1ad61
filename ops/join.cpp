// Joining and repeating tensors. Elements only move, so pending reductions of any kind stay pending.
#include "ops/family.hpp"

#include <ATen/ExpandUtils.h>

#include <numeric>

namespace dtensor::rules {
namespace {

Structure cat(const Call& call) {
  const auto count = call.arguments[0].toListRef().size();
  int64_t ndim = 0, total = 0;
  for (size_t i = 0; i < count; ++i) ndim = std::max(ndim, call.operands[i].ndim());
  const auto dim = wrap_dim(call.int_arg("dim"), ndim);
  Structure structure{{}, {{}}, {}, {kAnyPartial, {{}}}};
  for (size_t i = 0; i < count; ++i) {
    const auto sizes = call.operands[i].sizes();
    // Old habit of cat: a tensor of shape [0] joins anything.
    if (static_cast<int64_t>(sizes.size()) != ndim) {
      structure.in.push_back(without_letters(sizes));
      continue;
    }
    structure.in.push_back(lettered(sizes));
    structure.in.back()[dim].letter = kWhole;
    structure.out[0] = structure.in.back();
    total += sizes[dim];
  }
  structure.out[0][dim].size = total;
  return structure;
}

// Parts cut in blocks of one length lie, block after block, as one dim of all the blocks: what undoes the split of a fused
// projection.
class Concatenation final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = beside_->candidates(call, mesh_dim);
    if (call.operands.empty()) return result;
    const auto ndim = call.operands[0].ndim();
    int64_t common = 0;
    for (const auto& operand : call.operands) {
      if (operand.ndim() != ndim) return result;
      common = std::gcd(common, operand.sizes()[wrap_dim(call.int_arg("dim"), ndim)]);
    }
    const auto dim = wrap_dim(call.int_arg("dim"), ndim);
    for (size_t i = 0; i < call.operands.size(); ++i) {
      const auto& now = call.chosen[i][mesh_dim];
      if (now.is_shard(dim)) offer(call, dim, call.operands[i].sizes()[dim] / now.split, now.cut(), result);
    }
    if (common >= call.mesh.size(mesh_dim)) offer(call, dim, common, Cut(), result);
    return result;
  }

 private:
  static void offer(const Call& call, int64_t dim, int64_t block, const Cut& cut, Candidates& result) {
    Candidate candidate;
    int64_t blocks = 0;
    for (const auto& operand : call.operands) {
      const auto size = operand.sizes()[dim];
      if (size == 0 || block == 0 || size % block != 0) return;
      candidate.in.push_back(shard(dim, Cut{detail::saturate<int32_t>(size / block), cut.unit, cut.shares}));
      blocks += size / block;
    }
    candidate.out.push_back(shard(dim, Cut{detail::saturate<int32_t>(blocks), cut.unit, cut.shares}));
    result.push_back(std::move(candidate));
  }

  RulePtr beside_ = family(cat);
};

Structure stack(const Call& call) {
  const auto count = call.arguments[0].toListRef().size();
  const auto element = lettered(call.operands[0].sizes());
  auto out = element;
  out.insert(out.begin() + wrap_dim(call.int_arg("dim"), static_cast<int64_t>(element.size()) + 1),
             {kWhole, static_cast<int64_t>(count)});
  return {std::vector<Dims>(count, element), {out}, {}, {kAnyPartial, {{}}}};
}

Structure repeat(const Call& call) {
  const auto times = call.ints_arg("repeats");
  auto in = lettered(call.operands[0].sizes());
  const auto leading = times.size() - in.size();
  Dims out;
  for (size_t d = 0; d < times.size(); ++d) {
    if (d < leading) {
      out.push_back({kWhole, times[d]});
      continue;
    }
    auto& dim = in[d - leading];
    if (times[d] != 1) dim.letter = kWhole;
    out.push_back({dim.letter, dim.size * times[d]});
  }
  return {{in}, {out}, {}, {kAnyPartial, {{0}}}};
}

// A dim that is repeated n times holds n blocks, each cut as the dim was.
class Repetition final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = beside_->candidates(call, mesh_dim);
    const auto& now = call.operands[0].placements()[mesh_dim];
    if (!now.is_shard()) return result;
    const auto times = call.ints_arg("repeats");
    const auto leading = static_cast<int64_t>(times.size()) - call.operands[0].ndim();
    const auto blocks = times[leading + now.dim];
    if (blocks > 1)
      result.push_back({{now}, {shard(leading + now.dim, Cut{detail::saturate<int32_t>(blocks * now.split), now.unit, now.shares})}});
    return result;
  }
  std::vector<OutputMeta> output_metas(const Call& call) const override { return beside_->output_metas(call); }

 private:
  RulePtr beside_ = family(repeat);
};

// The dims that an operator rearranges are whole.
Structure rearranged(const Call& call, Sizes strides) {
  const auto& self = call.operands[0];
  auto dims = lettered(self.sizes());
  for (const auto dim : dims_arg(call, "dims", self.ndim())) dims[dim].letter = kWhole;
  Structure structure{{dims}, {dims}, {}, {kAnyPartial, {{0}}}};
  structure.strides = {std::move(strides)};
  return structure;
}

// The result lies in memory as self does.
Structure flip(const Call& call) {
  const auto& self = *call.operands[0].layout;
  const auto strides = at::infer_dense_strides(self.sizes(), self.strides());
  return rearranged(call, Sizes(strides.begin(), strides.end()));
}

// Dims that turn are whole; an odd number of quarter turns swaps them.
Structure quarter_turns(const Call& call) {
  auto structure = flip(call);
  const auto dims = dims_arg(call, "dims", call.operands[0].ndim());
  if (call.int_arg("k") % 2 != 0 && dims.size() == 2) {
    std::swap(structure.out[0][dims[0]], structure.out[0][dims[1]]);
    std::swap(structure.strides[0][dims[0]], structure.strides[0][dims[1]]);
  }
  return structure;
}

// Two slices change places; where no dim is named, the elements roll as one row.
Structure roll(const Call& call) {
  const auto& self = *call.operands[0].layout;
  return rearranged(call, call.ints_arg("dims").empty() ? contiguous_strides(self.sizes()) : strides_like(self.sizes(), self));
}

// -- The table -------------------------------------------------------------------------------------------------------

const Register concatenation("aten::cat", std::make_shared<Concatenation>(),
                             "dims that are not joined keep their cuts; so does a joined one whose parts are cut in equal blocks");
const Register stacking("aten::stack aten::_stack", family(stack), "dims of the elements keep their cuts");
const Register repetition("aten::repeat", std::make_shared<Repetition>(), "dims keep their cuts; a repeated one is cut in each repetition");
const Register flipped("aten::flip", family(flip), "dims that are not flipped keep their cuts");
const Register turns("aten::rot90", family(quarter_turns), "dims that do not turn keep their cuts");
const Register rotation("aten::roll", family(roll), "dims that are not rolled keep their cuts");

}  // namespace
}  // namespace dtensor::rules
