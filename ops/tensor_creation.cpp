// Tensors made like another one (zeros_like, new_empty). The operand's values are not read, so it never moves.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

// Whatever follows the first operand lies as it does, where the sizes are equal; other operands are whole. A tensor of given
// strides is whole: autograd makes one to address it by strides (as_strided), which takes all of it.
class Like : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const auto& now = call.operands[0].placements()[mesh_dim];
    Candidate candidate{Placements(call.operands.size(), replicate()),
                        {follows(call) && !now.is_partial() ? now : replicate()}};
    candidate.in[0] = now;
    return {candidate};
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const int size = call.argument_index("size");
    const auto& like = resolution.in[0];
    if (size < 0 || !follows(call) || like->is_replicated()) return {};
    const auto sizes = like->local_sizes().vec();
    return [=](LocalCall& local) {
      local.arg(size) = sizes;
      local.call();
    };
  }

 private:
  static bool follows(const Call& call) {
    return !call.has("size") || (!call.has("stride") && call.ints_arg("size") == call.operands[0].sizes());
  }
};

const Register like(
    "aten::empty_like aten::zeros_like aten::ones_like aten::full_like aten::new_empty aten::new_zeros "
    "aten::new_ones aten::new_full aten::new_empty_strided",
    std::make_shared<Like>(), "only the shape of the operand matters");

}  // namespace
}  // namespace dtensor::rules
