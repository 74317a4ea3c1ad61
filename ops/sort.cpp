// Sorting along a dim, and triangles of matrices.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

Structure topk(const Call& call) {
  auto in = lettered(call.operands[0].sizes());
  auto out = in;
  if (!in.empty()) {
    const auto dim = wrap_dim(call.int_arg("dim"), call.operands[0].ndim());
    in[dim].letter = kWhole;
    out[dim] = {kWhole, call.int_arg("k")};
  }
  return {{in}, {out, out}, {}, {}};
}

std::vector<int64_t> last_two(const Call& call) {
  const auto ndim = call.operands[0].ndim();
  return {ndim - 2, ndim - 1};
}

const Register sorted("aten::sort aten::argsort", sliced("dim"), "needs whole slices; slices are independent");
const Register largest("aten::topk", family(topk), "needs whole slices; slices are independent");
const Register triangles("aten::tril aten::triu", sliced(last_two, {kAnyPartial, {{0}}}),
                         "matrices are independent, and zero is zero on every rank");

}  // namespace
}  // namespace dtensor::rules
