// Reductions. Reducing a sharded dim makes the result Partial, with the operation of the reduction.
#include "ops/family.hpp"

#include <ATen/OpMathType.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace dtensor::rules {
namespace {

using MaybeOp = std::optional<ReduceOp>;

// `combines`: what the results over parts combine with; none: reduced dims are whole.
Structure reduce(const Call& call, MaybeOp combines, KeepsPartial keeps) {
  const auto& self = call.operands[0];
  const auto reduced = dims_arg(call, "dim", self.ndim());
  const bool keep = call.has("keepdim") && call.bool_arg("keepdim");
  auto in = lettered(self.sizes());
  Dims out;
  for (int64_t d = 0; d < self.ndim(); ++d) {
    const bool gone = std::ranges::find(reduced, d) != reduced.end();
    if (!gone) out.push_back(in[d]);
    if (gone && keep) out.push_back({kWhole, 1});
    if (gone && (!combines || in[d].size == 0)) in[d].letter = kWhole;
  }
  const auto outputs = call.schema.returns().size();
  Structure structure{{in}, std::vector<Dims>(outputs, out), {}, {}};
  if (outputs == 1) structure.keeps = std::move(keeps);  // of two, one is an index
  if (combines && outputs == 1) structure.lacking = {partial(*combines)};
  structure.elementwise = !structure.lacking.empty() && static_cast<int64_t>(reduced.size()) == self.ndim();
  return structure;
}

// -- Lowerings --------------------------------------------------------------------------------------------------------

// The mean over a cut dim: the local sum over the global count, so that uneven parts weigh right. As on one device, what has too few digits
// for a sum is added up in float.
Lowering mean_of_shards(const Call& call, const Resolution& resolution) {
  const auto& self = call.operands[0];
  const auto reduced = dims_arg(call, "dim", self.ndim());
  if (!is_cut(resolution.in[0], reduced)) return {};
  int64_t count = 1;
  for (const auto dim : reduced) count *= self.sizes()[dim];
  const bool keep = call.has("keepdim") && call.bool_arg("keepdim");
  const auto dtype = call.arg("dtype").toOptional<at::ScalarType>().value_or(self.layout->dtype());
  return [=](LocalCall& local) {
    local.replace({at::sum(local.arg(0).toTensor(), reduced, keep, at::toOpMathType(dtype)).div_(count).to(dtype)});
  };
}

at::Scalar lowest(at::ScalarType dtype) {
  if (at::isFloatingType(dtype)) return -std::numeric_limits<double>::infinity();
  switch (dtype) {
    case at::kChar: return std::numeric_limits<int8_t>::lowest();
    case at::kShort: return std::numeric_limits<int16_t>::lowest();
    case at::kInt: return std::numeric_limits<int32_t>::lowest();
    case at::kLong: return std::numeric_limits<int64_t>::lowest();
    default: return 0;
  }
}

at::Scalar highest(at::ScalarType dtype) {
  if (at::isFloatingType(dtype)) return std::numeric_limits<double>::infinity();
  switch (dtype) {
    case at::kByte: return std::numeric_limits<uint8_t>::max();
    case at::kChar: return std::numeric_limits<int8_t>::max();
    case at::kShort: return std::numeric_limits<int16_t>::max();
    case at::kInt: return std::numeric_limits<int32_t>::max();
    case at::kLong: return std::numeric_limits<int64_t>::max();
    default: return 1;
  }
}

using Identity = at::Scalar (*)(at::ScalarType);

// ATen refuses the extremes of nothing; a rank whose part is empty contributes the identity.
LoweringOf with_identity(Identity identity) {
  return [identity](const Call& call, const Resolution& resolution) -> Lowering {
    const auto reduced = dims_arg(call, "dim", call.operands[0].ndim());
    if (!is_cut(resolution.in[0], reduced)) return {};
    const bool keep = call.has("keepdim") && call.bool_arg("keepdim");
    const int dtype_at = call.argument_index("dtype");
    return [=](LocalCall& local) {
      const auto self = local.arg(0).toTensor();
      if (self.numel() > 0) return local.call();
      const bool given = dtype_at >= 0 && !local.arg(dtype_at).isNone();
      const auto dtype = c10::toRealValueType(given ? local.arg(dtype_at).toScalarType() : self.scalar_type());  // what is ordered
      const auto sizes = at::sum(self, reduced, keep).sizes().vec();
      local.replace({at::full(sizes, identity(dtype), self.options().dtype(dtype))});
    };
  };
}

// -- Norms ------------------------------------------------------------------------------------------------------------

double norm_order(const Call& call) {
  const auto& order = call.arg(call.has("ord") ? "ord" : "p");
  return order.isNone() ? 2 : order.toScalar().to<double>();
}

// |x|_p over parts: the sum for p = 1 and p = 0, the largest for infinity, the root of the sum of squares for p = 2.
MaybeOp norm_combines(double order) {
  if (order == 2) return ReduceOp::norm2;
  if (order == 1 || order == 0) return ReduceOp::sum;
  if (std::isinf(order)) return order > 0 ? ReduceOp::max : ReduceOp::min;
  return {};
}

Structure norm(const Call& call) {
  const double order = norm_order(call);
  // The 2-norm of 2-norms is the 2-norm of everything.
  return reduce(call, norm_combines(order), order == 2 ? KeepsPartial{{ReduceOp::norm2}, {{0}}} : KeepsPartial{});
}

Lowering lower_norm(const Call& call, const Resolution& resolution) {
  const double order = norm_order(call);
  if (!std::isinf(order)) return {};
  return order > 0 ? with_identity([](at::ScalarType) { return at::Scalar(0); })(call, resolution)
                   : with_identity(highest)(call, resolution);
}

// -- The table --------------------------------------------------------------------------------------------------------

RulePtr reduction(MaybeOp combines, std::vector<ReduceOp> keeps = {}, LoweringOf lower = {}) {
  return family([=](const Call& call) {
    const bool indexed = call.schema.returns().size() > 1;  // where the extreme is, only whole slices tell
    return reduce(call, combines, indexed ? KeepsPartial() : KeepsPartial{keeps, {{0}}});
  }, std::move(lower));
}

// An empty list of dims means no dim to the newer overloads of any and all, and every dim to all other reductions.
RulePtr logical(ReduceOp combines) {
  return family([=](const Call& call) {
    const bool nothing =
        call.schema.overload_name() == "dims" && !call.arg("dim").isNone() && call.ints_arg("dim").empty();
    if (!nothing) return reduce(call, combines, {});
    const auto dims = lettered(call.operands[0].sizes());
    return Structure{{dims}, {dims}, {}, {}};
  });
}

const Register sum("aten::sum", reduction(ReduceOp::sum, kSums), "sums of parts add up, and a sum is linear");
const Register nansum("aten::nansum aten::count_nonzero", reduction(ReduceOp::sum), "sums of parts add up");
const Register mean("aten::mean", reduction(ReduceOp::sum, kSums, mean_of_shards),
                    "local sums over the global count add up, and a mean is linear");
const Register product("aten::prod", reduction(ReduceOp::product, {ReduceOp::product}), "products of parts multiply");
const Register largest("aten::amax aten::max", reduction(ReduceOp::max, {ReduceOp::max}, with_identity(lowest)),
                       "the largest of the parts' largest; an index (max.dim) needs the whole dim");
const Register smallest("aten::amin aten::min", reduction(ReduceOp::min, {ReduceOp::min}, with_identity(highest)),
                        "the smallest of the parts' smallest; an index (min.dim) needs the whole dim");
const Register any("aten::any", logical(ReduceOp::max), "true where any part is");
const Register all("aten::all", logical(ReduceOp::min), "true where all parts are");
const Register norms("aten::norm aten::linalg_vector_norm", family(norm, lower_norm),
                     "norms of parts combine: sums of powers add up, maxima compare");
const Register whole(
    "aten::var aten::std aten::var_mean aten::std_mean aten::logsumexp aten::argmax aten::argmin "
    "aten::aminmax aten::median aten::nanmedian aten::mode aten::kthvalue",
    reduction({}), "needs whole slices; slices are independent");
const Register renormalized("aten::renorm", sliced([](const Call& call) {
                              const auto kept = wrap_dim(call.int_arg("dim"), call.operands[0].ndim());
                              std::vector<int64_t> others;
                              for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
                                if (d != kept) others.push_back(d);
                              }
                              return others;
                            }),
                            "the slices of dim are scaled by their norms, each by itself");
const Register trace("aten::trace", family([](const Call& call) {
                       return Structure{{without_letters(call.operands[0].sizes())}, {{}}, {}, {kSums, {{0}}}};
                     }),
                     "linear; the diagonal crosses both dims");
const Register equal("aten::equal", replicated(), "one answer, for all elements of both");
const Register running_sum("aten::cumsum", sliced("dim", {kSums, {{0}}}),
                           "needs whole slices; a running sum is linear");
const Register running("aten::cumprod aten::logcumsumexp aten::_logcumsumexp aten::cummax aten::cummin", sliced("dim"),
                       "needs whole slices; slices are independent");

}  // namespace
}  // namespace dtensor::rules
