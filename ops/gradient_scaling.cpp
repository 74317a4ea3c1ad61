// Dynamic loss scaling: unscales gradients in place. If a gradient is not finite on one rank, all ranks get to know.
#include "ops/family.hpp"

#include <algorithm>

namespace dtensor::rules {
namespace {

class Unscale final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    Candidate candidate{Placements(call.operands.size(), replicate()), {}};
    for (size_t i = 0; i < call.operands.size(); ++i) {
      const auto& now = call.operands[i].placements()[mesh_dim];
      if (call.operands[i].element >= 0 && !now.is_partial()) candidate.in[i] = now;
    }
    return {candidate};
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    std::vector<int64_t> cutting;
    for (int64_t m = 0; m < call.mesh.ndim(); ++m) {
      const bool cut =
          std::ranges::any_of(resolution.in, [m](const auto& l) { return l->placements()[m].cuts(); });
      if (cut && call.mesh.size(m) > 1) cutting.push_back(m);
    }
    if (cutting.empty()) return {};
    return [mesh = call.mesh, cutting, found = call.argument_index("found_inf")](LocalCall& local) {
      const auto found_inf = local.arg(found).toTensor();
      local.call();
      found_inf.copy_(mesh.communicator(cutting).all_reduce(found_inf, ReduceOp::max).get());
    };
  }
};

const Register unscale("aten::_amp_foreach_non_finite_check_and_unscale", std::make_shared<Unscale>(),
                       "pointwise; what one rank finds concerns all");

}  // namespace
}  // namespace dtensor::rules
