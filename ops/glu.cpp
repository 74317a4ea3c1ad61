// Gated linear units: one half of a dim gates the other half. A dim that is sharded within both halves alike stays sharded.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

Structure beside(const Call& call, KeepsPartial keeps) {
  const auto& self = *call.operand(call.argument_index("self"));
  const auto dim = wrap_dim(call.int_arg("dim"), self.ndim());
  auto whole = lettered(self.sizes());
  whole[dim].letter = kWhole;
  auto half = whole;
  half[dim].size /= 2;
  if (call.operands.size() == 1) return {{whole}, {half}, {}, std::move(keeps)};
  return {{half, whole}, {whole}, {}, std::move(keeps)};
}

class Gated final : public Rule {
 public:
  explicit Gated(KeepsPartial keeps) : beside_(family([keeps](const Call& call) { return beside(call, keeps); })) {}

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
  RulePtr beside_;
};

const Register forward("aten::glu", std::make_shared<Gated>(KeepsPartial()), "an element needs its partner in the other half");
const Register backward("aten::glu_backward", std::make_shared<Gated>(KeepsPartial{kSums, {{0}}}),
                        "as forward, and linear in the incoming gradient");

}  // namespace
}  // namespace dtensor::rules
