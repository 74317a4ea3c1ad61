// Distances and products between pairs of rows.
#include "ops/family.hpp"
#include "ops/view_dims.hpp"

#include <ATen/ops/zeros.h>

namespace dtensor::rules {
namespace {

const Register distances("aten::_cdist_forward", einsum("...pm,...rm->...pr", {.whole = "m"}), "each pair of rows by itself");
// Where either has no rows libtorch's kernel gives zeros like the first, also where the second has more matrices.
class CdistBackward final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return pairs_->candidates(call, mesh_dim); }
  std::vector<Sizes> output_sizes(const Call& call) const override { return pairs_->output_sizes(call); }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (!is_empty(resolution.in[1]->local_sizes()) && !is_empty(resolution.in[2]->local_sizes())) return {};
    return [sizes = local_output_sizes(call, resolution, 0)](LocalCall& local) {
      local.replace({at::zeros(sizes, local.arg(1).toTensor().options())});
    };
  }

 private:
  RulePtr pairs_ = einsum("...pr,...pm,...rm,...pr->...pm", {.whole = "m", .linear = {0}});
};

const Register gradient("aten::_cdist_backward", std::make_shared<CdistBackward>(),
                        "linear in the incoming gradient; a row's gradient sums over the rows that it was compared with");
const Register euclidean("aten::_euclidean_dist", einsum("...pm,...rm->...pr", {.whole = "m"}), "each pair of rows by itself");

// self x other along one dim, the other dims broadcast.
Structure cross(const Call& call) {
  Dims shape;
  auto in = broadcast(call, {0, 1}, shape);
  const auto dim = wrap_dim(call.int_arg("dim"), static_cast<int64_t>(shape.size()));
  for (auto& dims : in) {
    const auto own = dim - static_cast<int64_t>(shape.size() - dims.size());
    if (own >= 0) dims[own].letter = kWhole;
  }
  shape[dim].letter = kWhole;
  return {std::move(in), {shape}};
}
const Register crossed("aten::linalg_cross", family(cross), "every vector by itself");

}  // namespace
}  // namespace dtensor::rules
