// Gated linear units: two halves of one dim, one gating the other. A dim that is cut within both halves alike stays cut.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

Structure beside(const Call& call) {
  const auto& self = *call.operand(call.argument_index("self"));
  const auto dim = wrap_dim(call.int_arg("dim"), self.ndim());
  auto whole = lettered(self.sizes());
  whole[dim].letter = kWhole;
  auto half = whole;
  half[dim].size /= 2;
  if (call.operands.size() == 1) return {{whole}, {half}};
  return {{half, whole}, {whole}};
}

class Gated final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = beside_->candidates(call, mesh_dim);
    const auto& self = *call.operand(call.argument_index("self"));
    const auto dim = wrap_dim(call.int_arg("dim"), self.ndim());
    const auto halves = strided_shard(dim, 2), half = shard(dim);
    result.push_back(call.operands.size() == 1 ? Candidate{{halves}, {half}} : Candidate{{half, halves}, {halves}});
    return result;
  }
  std::vector<OutputMeta> output_metas(const Call& call) const override { return beside_->output_metas(call); }

 private:
  RulePtr beside_ = family(beside);
};

const Register forward("aten::glu", std::make_shared<Gated>(), "an element needs its partner in the other half");
const Register backward("aten::glu_backward", std::make_shared<Gated>(),
                        "as forward");

}  // namespace
}  // namespace dtensor::rules
