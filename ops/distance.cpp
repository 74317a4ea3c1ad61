// Distances and products between rows.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

const Register distances("aten::_cdist_forward", einsum("...pm,...rm->...pr", {.whole = "m"}), "each pair of rows by itself");
const Register gradient("aten::_cdist_backward", einsum("...pr,...pm,...rm,...pr->...pm", {.whole = "m", .linear = {0}}),
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
