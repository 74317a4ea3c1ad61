// Operators that write into a view of a copy: slice_scatter, select_scatter, diagonal_scatter. Elements only move.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

// src is converted to the dtype of self.
KeepsPartial kept(const Call& call) {
  return {kept_by_conversion(call.operands[1].layout->dtype(), call.operands[0].layout->dtype()), {{0, 1}}};
}

// The dims that the view drops or cuts are whole; src has the others, and the cut one.
Structure structure(const Call& call, c10::ArrayRef<int64_t> whole, bool dropped) {
  auto self = lettered(call.operands[0].sizes());
  for (const auto dim : whole) self[dim].letter = kWhole;
  Dims src;
  for (size_t d = 0; d < self.size(); ++d) {
    const bool is_whole = self[d].letter == kWhole;
    if (!is_whole || !dropped) src.push_back(self[d]);
  }
  if (src.size() < static_cast<size_t>(call.operands[1].ndim())) src.push_back({});  // the diagonal
  for (size_t d = 0; d < src.size(); ++d) src[d].size = call.operands[1].sizes()[d];
  return {{self, src}, {self}, {}, kept(call)};
}

int64_t dim_arg(const Call& call, std::string_view name = "dim") { return wrap_dim(call.int_arg(name), call.operands[0].ndim()); }

const Register slices("aten::slice_scatter", family([](const Call& call) { return structure(call, {dim_arg(call)}, false); }),
                      "dims that are not sliced keep their cuts");
const Register selections("aten::select_scatter", family([](const Call& call) { return structure(call, {dim_arg(call)}, true); }),
                          "the other dims keep their cuts");
const Register diagonals("aten::diagonal_scatter", family([](const Call& call) {
                           return structure(call, {dim_arg(call, "dim1"), dim_arg(call, "dim2")}, true);
                         }),
                         "dims off the diagonal keep their cuts");

}  // namespace
}  // namespace dtensor::rules
