// Pointwise operators: every dim may be cut. What differs is which Partial operands they pass through.
#include "ops/pointwise.hpp"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace dtensor::rules {

namespace {

// The dim of an operand that lies under the output dim `from_right` (0 is the last), or -1 where it broadcasts.
int64_t dim_under(const Operand& operand, int64_t from_right, int64_t length) {
  const auto dim = operand.ndim() - 1 - from_right;
  return dim >= 0 && operand.sizes()[dim] == length ? dim : -1;
}

std::set<std::pair<int32_t, int64_t>> cuts(const Call& call, int64_t mesh_dim, const std::vector<int>& members,
                                           int64_t from_right, int64_t length) {
  std::set<std::pair<int32_t, int64_t>> found{{1, 1}};
  for (const int i : members) {
    const auto& p = call.operands[i].placements()[mesh_dim];
    if (p.is_shard() && p.dim == dim_under(call.operands[i], from_right, length)) found.emplace(p.split, p.unit);
  }
  return found;
}

class Pointwise : public Rule {
 public:
  explicit Pointwise(KeepsPartial keeps) : keeps_(std::move(keeps)) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    std::vector<int> all(call.operands.size());
    std::iota(all.begin(), all.end(), 0);
    return pointwise_candidates(call, mesh_dim, all, call.schema.returns().size(), keeps_);
  }

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    return std::vector<OutputMeta>(call.schema.returns().size(), pointwise_meta(call));
  }

  bool reads_numbers() const override { return false; }

 private:
  KeepsPartial keeps_;
};

}  // namespace

Candidates pointwise_candidates(const Call& call, int64_t mesh_dim, const std::vector<int>& members, size_t outputs,
                                const KeepsPartial& keeps) {
  Candidates result;
  int64_t ndim = 0;
  for (const int i : members) ndim = std::max(ndim, call.operands[i].ndim());
  for (int64_t from_right = ndim - 1; from_right >= 0; --from_right) {
    int64_t length = 1;
    for (const int i : members) {
      const auto dim = call.operands[i].ndim() - 1 - from_right;
      if (dim >= 0 && length == 1) length = call.operands[i].sizes()[dim];
    }
    for (const auto& [split, unit] : cuts(call, mesh_dim, members, from_right, length)) {
      Candidate candidate{Placements(call.operands.size(), replicate()),
                          Placements(outputs, strided_shard(ndim - 1 - from_right, split, unit))};
      for (const int i : members) {
        const auto dim = dim_under(call.operands[i], from_right, length);
        if (dim >= 0) candidate.in[i] = strided_shard(dim, split, unit);
      }
      result.push_back(std::move(candidate));
    }
  }
  for (const auto op : keeps.ops) {
    for (const auto& together : keeps.together) {
      const bool present = std::any_of(together.begin(), together.end(), [&](int m) {
        return m < static_cast<int>(members.size()) && call.operands[members[m]].placements()[mesh_dim].is_partial(op);
      });
      if (!present) continue;
      Candidate candidate{Placements(call.operands.size(), replicate()), Placements(outputs, partial(op))};
      for (const int m : together) {
        if (m < static_cast<int>(members.size())) candidate.in[members[m]] = partial(op);
      }
      result.push_back(std::move(candidate));
    }
  }
  return result;
}

OutputMeta pointwise_meta(const Call& call) {
  at::TensorIteratorConfig config;  // ATen's own
  config.check_all_same_dtype(false).check_all_same_device(false).add_owned_output(at::Tensor());
  const bool swaps = call.schema.name() == "aten::rsub";  // it is sub(other, self), and the first operand's order counts
  for (size_t i = 0, n = call.operands.size(); i < n; ++i) {
    const auto& layout = *call.operands[swaps ? n - 1 - i : i].layout;
    config.add_owned_input(at::empty_strided(layout.sizes(), layout.strides(), at::TensorOptions(at::kMeta).dtype(layout.dtype())));
  }
  const auto dtype = call.operands[0].layout->dtype();
  const auto like = config.declare_static_dtype_and_device(dtype, at::kMeta).build().output();
  return {Sizes(like.sizes().begin(), like.sizes().end()), Sizes(like.strides().begin(), like.strides().end()), dtype};
}

RulePtr pointwise(KeepsPartial keeps) { return std::make_shared<Pointwise>(std::move(keeps)); }

namespace {

const std::vector<ReduceOp> kSums{ReduceOp::sum, ReduceOp::avg};
const std::vector<ReduceOp> kExtremes{ReduceOp::max, ReduceOp::min};

const auto kPlain = pointwise();
const auto kLinear = pointwise({kSums, {{0}}});                     // in its first operand
const auto kAdditive = pointwise({kSums, {{0, 1}}});                // in both together
const auto kBilinear = pointwise({kSums, {{0}, {1}}});              // in each alone
const auto kIncreasing = pointwise({kExtremes, {{0}}});

// self + number. Written in place, a pending sum stays one: the number goes to one of its parts.
class AddNumber final : public Pointwise {
 public:
  AddNumber() : Pointwise({kExtremes, {{0}}}) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = Pointwise::candidates(call, mesh_dim);
    const auto& now = call.operands[0].placements()[mesh_dim];
    // The extreme of an empty part is the largest or smallest number there is: whole numbers wrap around.
    if (!at::isFloatingType(call.operands[0].layout->dtype())) std::erase_if(result, [](const auto& c) { return c.in[0].is_partial(); });
    if (call.in_place && (now.is_partial(ReduceOp::sum) || now.is_partial(ReduceOp::avg))) result.push_back({{now}, {now}});
    return result;
  }

  Lowering lower(const Call&, const Resolution& resolution) const override {
    const auto& layout = *resolution.in[0];
    for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
      if (!layout.placements()[m].is_partial(ReduceOp::sum) || layout.mesh().coordinate(m) == 0) continue;
      return [](LocalCall& local) { local.replace({local.arg(0)}); };
    }
    return {};
  }
};

const Register additive("aten::add.Tensor aten::sub.Tensor aten::rsub.Tensor aten::add.out aten::sub.out aten::add_.Tensor "
                        "aten::sub_.Tensor",
                        kAdditive, "f(a + a', b + b') = f(a, b) + f(a', b')");
const Register bilinear("aten::mul.Tensor aten::mul.out aten::mul_.Tensor", kBilinear, "(a + a') b = a b + a' b");
const Register linear("aten::neg aten::mul.Scalar aten::div.Scalar aten::mul_.Scalar aten::div_.Scalar aten::div.Tensor "
                      "aten::div_.Tensor aten::div.out aten::real aten::imag aten::conj_physical aten::deg2rad aten::rad2deg",
                      kLinear, "f(a + a') = f(a) + f(a')");
const Register lerp("aten::lerp.Scalar aten::lerp_.Scalar", kAdditive, "(1 - w) a + w b is linear in (a, b)");
const Register addcmul("aten::addcmul aten::addcmul_", pointwise({kSums, {{0, 1}, {0, 2}}}),
                       "s + v a b is linear in (s, a) and in (s, b)");
const Register addcdiv("aten::addcdiv aten::addcdiv_", pointwise({kSums, {{0, 1}}}), "s + v a / b is linear in (s, a)");
const Register where("aten::where.self aten::where.ScalarSelf aten::where.ScalarOther aten::where.Scalar",
                     pointwise({kSums, {{1, 2}}}), "the condition is whole; selecting is linear in both values");
const Register increasing("aten::relu aten::exp aten::sigmoid aten::tanh aten::ceil aten::floor aten::round aten::trunc "
                          "aten::erf aten::expm1 aten::atan aten::sinh aten::asinh aten::hardtanh aten::sign aten::clamp "
                          "aten::clamp_min aten::clamp_max",
                          kIncreasing, "increasing: f(max(a, b)) = max(f(a), f(b))");
const Register number("aten::add.Scalar aten::sub.Scalar", std::make_shared<AddNumber>(),
                      "increasing; in place, (a + c) + a' = (a + a') + c");
const Register maximum("aten::maximum", pointwise({{ReduceOp::max}, {{0, 1}}}), "max(max, max) = max");
const Register minimum("aten::minimum", pointwise({{ReduceOp::min}, {{0, 1}}}), "min(min, min) = min");

const Register backward("aten::gelu_backward aten::silu_backward aten::threshold_backward aten::tanh_backward "
                        "aten::sigmoid_backward aten::leaky_relu_backward aten::hardtanh_backward aten::hardswish_backward "
                        "aten::hardsigmoid_backward aten::elu_backward aten::softplus_backward aten::softshrink_backward "
                        "aten::hardshrink_backward aten::mish_backward aten::logit_backward aten::native_dropout_backward "
                        "aten::log_sigmoid_backward",
                        kLinear, "linear in the incoming gradient");

const Register plain(
    "aten::abs aten::absolute aten::acos aten::acosh aten::angle aten::asin aten::atanh aten::atan2 aten::add aten::sub "
    "aten::rsub aten::bitwise_and aten::bitwise_or aten::bitwise_xor aten::bitwise_not aten::bitwise_left_shift "
    "aten::bitwise_right_shift aten::celu aten::copysign aten::cos aten::cosh aten::digamma aten::div aten::eq aten::ge "
    "aten::gt aten::le aten::lt aten::ne aten::erfc aten::erfinv aten::exp2 aten::fmax aten::fmin aten::fmod aten::frac "
    "aten::floor_divide aten::gcd aten::gelu aten::hardshrink aten::hardsigmoid aten::hardswish aten::heaviside aten::hypot "
    "aten::i0 aten::igamma aten::igammac aten::isfinite aten::isinf aten::isnan aten::isneginf aten::isposinf aten::lcm "
    "aten::lerp aten::lgamma aten::log aten::log10 aten::log1p aten::log2 aten::log_sigmoid_forward aten::logaddexp "
    "aten::logaddexp2 aten::logical_and aten::logical_not aten::logical_or aten::logical_xor aten::logit aten::masked_fill "
    "aten::mish aten::mul aten::mvlgamma aten::nan_to_num aten::nextafter aten::polar aten::complex aten::polygamma aten::pow "
    "aten::reciprocal aten::remainder aten::rsqrt aten::sgn aten::signbit aten::silu aten::sin aten::sinc aten::softshrink "
    "aten::special_entr aten::special_erfcx aten::special_i0e aten::special_i1 aten::special_i1e aten::special_log_ndtr "
    "aten::special_ndtri aten::special_xlog1py aten::special_zeta aten::sqrt aten::square aten::tan aten::threshold aten::where "
    "aten::xlogy aten::leaky_relu aten::elu aten::softplus "
    "aten::__and__ aten::__or__ aten::__xor__ aten::__lshift__ aten::__rshift__ aten::float_power aten::prelu "
    "aten::_prelu_kernel aten::prelu_backward aten::rrelu_with_noise_backward aten::ldexp aten::true_divide",
    kPlain, "each element depends on the elements at its position only");

}  // namespace
}  // namespace dtensor::rules
