// Embedding lookup and its gradient.
#include "ops/family.hpp"

#include <ATen/ops/zeros.h>

namespace dtensor::rules {
namespace {

enum : int { kRow = 100, kColumn = 101 };  // letters of the table; those of the indices count from 0

Structure forward(const Call& call) {
  const auto table = call.operands[0].sizes();
  const auto indices = lettered(call.operands[1].sizes());
  auto result = indices;
  result.push_back({kColumn, table[1]});
  return {{{{kRow, table[0]}, {kColumn, table[1]}}, indices}, {result}, {partial()}, {kSums, {{0}}}};
}

// Rows of other ranks are zero here, so that the ranks' results add up.
at::Tensor lookup(const at::Tensor& table, const at::Tensor& indices, const Intervals& held) {
  auto sizes = indices.sizes().vec();
  sizes.push_back(table.size(1));
  if (held.empty()) return at::zeros(sizes, table.options());
  const auto rows = own_rows(indices, held, -1);
  const auto found = table.index_select(0, rows.clamp_min(0).reshape({-1})).view(sizes);
  return found.masked_fill(rows.lt(0).unsqueeze(-1), 0);
}

Lowering masked_lookup(const Call& call, const Resolution& resolution) {
  const auto& table = resolution.in[0];
  if (!is_cut(table, int64_t{0})) return {};
  return [held = table->intervals(0, call.mesh.coordinate()), rows = table->sizes()[0]](LocalCall& local) {
    const auto indices = local.arg(1).toTensor();
    check_positions("aten::embedding", indices, rows, "index out of range in self");
    local.replace({lookup(local.arg(0).toTensor(), indices, held)});
  };
}

Structure backward(const Call& call) {
  const auto& gradient = call.operands[0];
  auto in = lettered(gradient.sizes());
  in.back().letter = kColumn;
  Dims indices(in.begin(), in.end() - 1);
  // How often an index occurs must be counted over all of them.
  const bool counted = call.bool_arg("scale_grad_by_freq");
  if (counted) {
    for (auto& dim : indices) dim.letter = kWhole;
    for (size_t d = 0; d + 1 < in.size(); ++d) in[d].letter = kWhole;
  }
  return {{in, indices}, {{{kWhole, call.int_arg("num_weights")}, in.back()}}, {partial()}, {kSums, {{0}}}};
}

const Register embedding("aten::embedding", family(forward, masked_lookup),
                         "positions and columns are independent; a row is on one rank and zero on the others");
const Register gradient("aten::embedding_dense_backward", family(backward),
                        "linear in the incoming gradient; contributions of positions add up");

}  // namespace
}  // namespace dtensor::rules
