// Copies and fills: the source is moved to the layout of the destination.
#include "ops/family.hpp"

#include <ATen/ops/full_like.h>

namespace dtensor::rules {
namespace {

Structure copy(const Call& call) {
  const auto dims = lettered(call.operands[0].sizes());
  Structure structure{{dims}, {dims}, {}, {kAnyPartial, {{0}}}};
  structure.elementwise = true;
  return structure;
}

// self.copy_(src): src lies as self does; it may broadcast.
Structure copy_into(const Call& call) {
  Dims shape;
  auto in = broadcast(call, {0, 1}, shape);
  const auto kept = kept_by_conversion(call.operands[1].layout->dtype(), call.operands[0].layout->dtype());
  Structure structure{std::move(in), {shape}, {}, {kept, {{0, 1}}}};
  structure.elementwise = true;
  return structure;
}

// A pending reduction of self takes on a whole source too: its parts are made as R -> P makes them. (A norm could not take on a
// number below 0.)
class CopyInto final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = pointwise_->candidates(call, mesh_dim);
    const auto& now = call.operands[0].placements()[mesh_dim];
    if (now.is_partial() && !now.is_partial(ReduceOp::norm2)) result.push_back({{now, replicate()}, {now}});
    return result;
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const auto& self = *resolution.in[0];
    bool keeps = true;
    double elsewhere = 0;
    for (int64_t m = 0; m < self.mesh().ndim(); ++m) {
      const auto& p = self.placements()[m];
      if (!p.is_partial() || resolution.in[1]->placements()[m].is_partial()) continue;
      const bool same_on_all = p.op == ReduceOp::avg || p.op == ReduceOp::min || p.op == ReduceOp::max;
      if (same_on_all || call.mesh.coordinate(m) == 0) continue;
      keeps = false;
      elsewhere = p.op == ReduceOp::product ? 1 : 0;
    }
    if (keeps) return {};
    return [elsewhere, writes = call.in_place](LocalCall& local) {
      const auto self = local.arg(0).toTensor();
      local.replace({writes ? self.fill_(elsewhere) : at::full_like(self, elsewhere)});
    };
  }

 private:
  RulePtr pointwise_ = family(copy_into);
};

// Fills only write. A value v everywhere is the average, minimum and maximum of v's, but not their sum; 0 is that too.
RulePtr fill(std::vector<ReduceOp> keeps) {
  return family([keeps = std::move(keeps)](const Call& call) {
    Structure structure{{}, {lettered(call.operands[0].sizes())}, {}, {keeps, {{0}}}};
    structure.elementwise = true;
    for (const auto& operand : call.operands) {
      structure.in.push_back(structure.in.empty() ? structure.out[0] : without_letters(operand.sizes()));
    }
    return structure;
  });
}

// self.masked_fill(mask, value): pointwise in self and mask.
Structure masked_fill(const Call& call) {
  Dims shape;
  auto in = broadcast(call, {0, 1}, shape);
  Structure structure{std::move(in), {shape}, {}, {kept_by_number(call.arg("value").toScalar()), {{0}}}};
  structure.elementwise = true;
  return structure;
}

const Register copies("aten::clone aten::_to_copy", family(copy),
                      "elements stay where they are; a conversion between floats is linear");
const Register copy_("aten::copy_ aten::copy", std::make_shared<CopyInto>(),
                     "the source is brought to where the destination lies");
const Register fill_("aten::fill_ aten::fill", fill(kOfEqualValues),
                     "the average, minimum and maximum of equal values is that value");
const Register zero_("aten::zero_ aten::zero", fill(kAnyPartial), "any reduction of zeros is zero");

const Register masked("aten::masked_fill.Scalar", family(masked_fill),
                      "pointwise; the average, minimum and maximum of equal values is that value, and any reduction of zeros is zero");

}  // namespace
}  // namespace dtensor::rules
