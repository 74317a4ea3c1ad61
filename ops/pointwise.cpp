// Pointwise operators. Every dim may be sharded. They differ in which Partial operands pass through unreduced.
#include "ops/pointwise.hpp"

#include "ops/family.hpp"
#include "src/rules/pending.hpp"

#include <dtensor/base/compat.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_strided.h>
#include <range/v3/numeric/iota.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <cmath>
#include <set>

namespace dtensor::rules {

namespace {

// The dim of an operand that lies under the output dim `from_right` (0 is the last), or -1 where it broadcasts.
int64_t dim_under(const Operand& operand, int64_t from_right, int64_t length) {
  const auto dim = operand.ndim() - 1 - from_right;
  return dim >= 0 && operand.sizes()[dim] == length ? dim : -1;
}

std::set<Cut> cuts(const Call& call, int64_t mesh_dim, const std::vector<int>& members, int64_t from_right, int64_t length) {
  std::set<Cut> found{Cut()};
  for (const int i : members) {
    const auto& p = call.operands[i].placements()[mesh_dim];
    if (p.is_shard() && p.dim == dim_under(call.operands[i], from_right, length)) found.insert(p.cut());
  }
  return found;
}

class Pointwise : public Rule {
 public:
  explicit Pointwise(KeepsPartial keeps) : keeps_(std::move(keeps)) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    std::vector<int> all(call.operands.size());
    ranges::iota(all, 0);
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
    for (const auto& cut : cuts(call, mesh_dim, members, from_right, length)) {
      Candidate candidate{Placements(call.operands.size(), replicate()),
                          Placements(outputs, shard(ndim - 1 - from_right, cut))};
      for (const int i : members) {
        const auto dim = dim_under(call.operands[i], from_right, length);
        if (dim >= 0) candidate.in[i] = shard(dim, cut);
      }
      result.push_back(std::move(candidate));
    }
  }
  if (const auto flat = common_flat(call, mesh_dim, members, call.outputs)) {
    Candidate candidate{Placements(call.operands.size(), replicate()), Placements(outputs, *flat)};
    for (const int i : members) candidate.in[i] = call.operands[i].ndim() > 0 ? *flat : replicate();
    result.push_back(std::move(candidate));
  }
  Placements now;
  for (const int i : members) now.push_back(call.operands[i].placements()[mesh_dim]);
  for (auto& kept : keeps.candidates(now, outputs, !wraps_around(call, members))) {
    Candidate candidate{Placements(call.operands.size(), replicate()), std::move(kept.out)};
    for (const auto& [member, placement] : ranges::views::zip(members, kept.in)) candidate.in[member] = placement;
    result.push_back(std::move(candidate));
  }
  return result;
}

bool wraps_around(const Call& call, const std::vector<int>& members) {
  return std::ranges::any_of(members, [&](int i) {
    const auto& operand = call.operands[i];
    const auto& placements = operand.placements();
    return at::isIntegralType(operand.layout->dtype(), /*includeBool=*/false) &&
           std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(); });
  });
}

bool is_divisor(const c10::IValue& number) {
  if (number.isList()) {
    const auto elements = number.toListRef();
    return std::ranges::all_of(elements, is_divisor);
  }
  if (number.isComplexDouble()) return std::isnormal(number.toComplexDouble().real()) || std::isnormal(number.toComplexDouble().imag());
  return number.isDouble() ? std::isnormal(number.toDouble()) : number.isInt() ? number.toInt() != 0 : number.toBool();
}

bool is_whole(const Operand& operand) { return at::isIntegralType(operand.layout->dtype(), /*includeBool=*/true); }

Candidates KeepsPartial::candidates(const Placements& now, size_t outputs, bool extremes) const {
  Candidates result;
  for (const auto& line : lines_) {
    for (const auto op : line.ops) {
      if (!extremes && (op == ReduceOp::max || op == ReduceOp::min)) continue;
      const auto flipped = op == ReduceOp::max ? ReduceOp::min : op == ReduceOp::min ? ReduceOp::max : op;
      const auto is_pending = [&](int i) { return i < static_cast<int>(now.size()) && now[i].is_partial(op); };
      for (const auto& together : line.together) {
        const bool present = together.empty() ? std::ranges::any_of(now, [&](const Placement& p) { return p.is_partial(op); })
                                              : std::ranges::any_of(together, is_pending);
        // A norm has no sign, so other numbers cannot become parts of one.
        const bool norms = op != ReduceOp::norm2 || std::ranges::all_of(together, is_pending);
        if (!present || !norms) continue;
        Candidate candidate{Placements(now.size(), together.empty() ? partial(op) : replicate()),
                            Placements(outputs, partial(line.flips ? flipped : op))};
        for (const int i : together) {
          if (i < static_cast<int>(now.size())) candidate.in[i] = partial(op);
        }
        result.push_back(std::move(candidate));
      }
    }
  }
  return result;
}

namespace {

at::Tensor on_meta(const Layout& layout) {
  return at::empty_strided(layout.sizes(), layout.strides(), at::TensorOptions(at::kMeta).dtype(layout.dtype()));
}

// The operands in the order in which the kernel sees them. The first one's memory order counts: rsub is sub(other, self), this loss begins
// with 1 - target, and the gradient of prelu comes after (self, weight).
std::vector<size_t> order_of_operands(const Call& call) {
  std::vector<size_t> order(call.operands.size());
  ranges::iota(order, 0);
  const auto& name = call.schema.name();
  if (order.size() < 2) return order;
  if (name == "aten::rsub" || name == "aten::binary_cross_entropy_with_logits") std::swap(order[0], order[1]);
  if (name == "aten::_prelu_kernel_backward") std::ranges::rotate(order, order.begin() + 1);
  return order;
}

// Whether the kernel has the number among the arguments as an operand of no dims. Then it does not copy the other's strides, and a dim of
// length one may get another.
bool number_is_operand(const Call& call) {
  const auto name = call.schema.name() + "." + call.schema.overload_name();
  return name == "aten::floor_divide.Scalar" || name == "aten::remainder.Scalar_Tensor" || name == "aten::_add_relu.Scalar";
}

}  // namespace

OutputMeta pointwise_meta(const Call& call) {
  at::TensorIteratorConfig config;  // ATen's own
  config.check_all_same_dtype(false).check_all_same_device(false).add_owned_output(at::Tensor());
  for (const auto i : order_of_operands(call)) config.add_owned_input(on_meta(*call.operands[i].layout));
  if (number_is_operand(call)) config.add_owned_input(at::empty_strided({}, {}, at::TensorOptions(at::kMeta)));
  const auto dtype = call.operands[0].layout->dtype();
  const auto like = config.declare_static_dtype_and_device(dtype, at::kMeta).build().output();
  return {Sizes(like.sizes().begin(), like.sizes().end()), Sizes(like.strides().begin(), like.strides().end()), dtype};
}

RulePtr pointwise(KeepsPartial keeps) { return std::make_shared<Pointwise>(std::move(keeps)); }

namespace {

// Operators whose kernel makes the result before it runs: with at::empty_like() of one operand, or in row-major order. For dims of length
// one that gives other strides than pointwise_meta().
enum class Order { of_first, row_major };
class MadeAhead final : public Pointwise {
 public:
  MadeAhead(Order order, KeepsPartial keeps = {}) : Pointwise(std::move(keeps)), order_(order) {}

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    auto metas = Pointwise::output_metas(call);
    const auto& first = *call.operands[0].layout;
    for (auto& meta : metas) {
      if (order_ == Order::row_major) meta.strides = dtensor::contiguous_strides(meta.sizes);
      else if (meta.sizes == first.sizes()) meta.strides = strides_like(first);
    }
    return metas;
  }

 private:
  static Sizes strides_like(const Layout& layout) {
    if (on_meta(layout).is_non_overlapping_and_dense()) return Sizes(layout.strides());
    const auto strides = at::infer_dense_strides(layout.sizes(), layout.strides());
    return Sizes(strides.begin(), strides.end());
  }

  Order order_;
};

const auto kPlain = pointwise();
const auto kLinear = pointwise({kSums, {{0}}});                     // in its first operand
const auto kIncreasing = pointwise({kExtremes, {{0}}});
const auto kDecreasing = pointwise({kExtremes, {{0}}, true});
// Linear in both together: an average may stand beside a whole operand, which is the average of itself.
const auto kAdditive = pointwise(KeepsPartial{kSums, {{0, 1}}} | KeepsPartial{{ReduceOp::avg}, {{0}, {1}}});

// self + number. Written in place, a pending sum stays one: the number goes to one of its parts.
class AddNumber final : public Pointwise {
 public:
  AddNumber() : Pointwise({{ReduceOp::avg}, {{0}}}) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = Pointwise::candidates(call, mesh_dim);
    const auto& now = call.operands[0].placements()[mesh_dim];
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

// A pending sum times a tensor: but in a backward pass, that must hold whole numbers, as a mask does. Over a tensor it may be zero.
class Product final : public Pointwise {
 public:
  enum class By { factor, divisor };
  Product(By by, std::vector<std::vector<int>> together) : Pointwise({kSums, std::move(together)}), by_(by) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = Pointwise::candidates(call, mesh_dim);
    const auto is_pending = [&](const Operand& operand) { return operand.placements()[mesh_dim].is_partial(); };
    const bool all_pending = std::ranges::all_of(call.operands, is_pending);  // not a gradient alone
    if (in_backward() && !all_pending && !(by_ == By::divisor && is_whole(call.operands[0]))) return result;
    std::erase_if(result, [&](const Candidate& candidate) {
      if (!candidate.out[0].is_partial()) return false;
      for (size_t i = 0; i < call.operands.size(); ++i) {
        if (!candidate.in[i].is_partial() && (by_ == By::divisor || !is_whole(call.operands[i]))) return true;
      }
      return false;
    });
    reduce_whole(call, mesh_dim, result);
    return result;
  }

 private:
  By by_;
};

// self / number
class QuotientByNumber final : public Pointwise {
 public:
  QuotientByNumber() : Pointwise({kSums, {{0}}}) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto result = Pointwise::candidates(call, mesh_dim);
    if (!is_divisor(call.arg("other"))) std::erase_if(result, [](const Candidate& candidate) { return candidate.out[0].is_partial(); });
    return result;
  }
};

// libtorch 1.13's kernel (oneDNN) takes both operands to lie alike in memory, whatever they say.
class GeluBackward final : public Pointwise {
 public:
  GeluBackward() : Pointwise({kSums, {{0}}}) {}

  Lowering lower(const Call&, const Resolution&) const override {
    if (DTENSOR_TORCH_AT_LEAST(2, 0)) return {};
    return [](LocalCall& local) {
      for (const int i : {0, 1}) local.arg(i) = local.arg(i).toTensor().contiguous();
      local.call();
    };
  }
};

const Register additive("aten::add.Tensor aten::sub.Tensor aten::add_.Tensor aten::sub_.Tensor", kAdditive,
                        "f(a + a', b + b') = f(a, b) + f(a', b')");
const Register reversed("aten::rsub.Tensor", pointwise(KeepsPartial{kSums, {{0, 1}}} | KeepsPartial{{ReduceOp::avg}, {{0}, {1}}}),
                        "f(a + a', b + b') = f(a, b) + f(a', b')");
const Register reversed_number("aten::rsub.Scalar", pointwise({{ReduceOp::avg}, {{0}}}), "an average of c - a's is c - their average");
const Register bilinear("aten::mul.Tensor aten::mul_.Tensor",
                        std::make_shared<Product>(Product::By::factor, std::vector<std::vector<int>>{{0}, {1}}),
                        "(a + a') b = a b + a' b, where b is finite");
const Register divided("aten::div.Tensor aten::div_.Tensor",
                       std::make_shared<Product>(Product::By::divisor, std::vector<std::vector<int>>{{0}}),
                       "(a + a') / b = a / b + a' / b, where b is not zero");
const Register linear("aten::mul.Scalar aten::mul_.Scalar aten::real aten::imag aten::conj_physical",
                      kLinear, "f(a + a') = f(a) + f(a')");
const Register conjugated("aten::_conj_physical",
                          DTENSOR_TORCH_AT_LEAST(2, 0) ? std::make_shared<MadeAhead>(Order::of_first, KeepsPartial{kSums, {{0}}}) : kLinear,
                          "f(a + a') = f(a) + f(a')");
const Register quotient("aten::div.Scalar aten::div_.Scalar", std::make_shared<QuotientByNumber>(),
                        "(a + a') / b = a / b + a' / b, where b is not zero");
const Register negative("aten::neg aten::negative", pointwise(KeepsPartial{kSums, {{0}}} | KeepsPartial{kExtremes, {{0}}, true}),
                        "linear, and decreasing");
const Register angles("aten::deg2rad aten::rad2deg", pointwise(KeepsPartial{kSums, {{0}}} | KeepsPartial{kExtremes, {{0}}}),
                      "linear, and increasing");
const Register lerp("aten::lerp.Scalar aten::lerp_.Scalar",
                    pointwise(KeepsPartial{kSums, {{0, 1}}} | KeepsPartial{{ReduceOp::avg}, {{0}, {1}}}),
                    "(1 - w) a + w b is linear in (a, b)");
const Register adds_product("aten::addcmul aten::addcmul_ aten::addcdiv aten::addcdiv_", pointwise({{ReduceOp::avg}, {{0}}}),
                            "an average of s's plus c is their average plus c");
const Register where("aten::where.self", pointwise(KeepsPartial{kAnyPartial, {{1, 2}}} | KeepsPartial{kOfEqualValues, {{1}, {2}}}),
                     "the condition is whole; an element of one is chosen, whatever its parts combine with");
const Register where_number("aten::where.ScalarSelf aten::where.ScalarOther", pointwise({kOfEqualValues, {{1}}}),
                            "as where; the number is the average, maximum and minimum of itself");
const Register increasing(
    "aten::relu aten::exp aten::exp2 aten::expm1 aten::sigmoid aten::tanh aten::ceil aten::floor "
    "aten::round aten::trunc aten::fix aten::erf aten::atan aten::arctan aten::sinh aten::asinh aten::arcsinh "
    "aten::clamp aten::clip aten::clamp_min aten::clamp_max aten::hardsigmoid aten::hardshrink "
    "aten::special_log_ndtr aten::special_ndtr",
    kIncreasing, "increasing: f(max(a, b)) = max(f(a), f(b))");
const Register clamped("aten::hardtanh aten::relu6", std::make_shared<MadeAhead>(Order::of_first, KeepsPartial{kExtremes, {{0}}}),
                       "increasing: f(max(a, b)) = max(f(a), f(b))");
const Register decreasing("aten::erfc aten::special_erfcx", kDecreasing, "decreasing: f(max(a, b)) = min(f(a), f(b))");
// Where the smallest of the parts lies in the domain of f, all of them do; where it does not, the result is none either way.
const Register increasing_above("aten::log aten::log2 aten::log10 aten::log1p aten::sqrt aten::acosh",
                                pointwise({{ReduceOp::min}, {{0}}}), "increasing above a bound: f(min(a, b)) = min(f(a), f(b))");
const Register decreasing_above("aten::rsqrt aten::special_modified_bessel_k0 aten::special_modified_bessel_k1 "
                                "aten::special_scaled_modified_bessel_k0 aten::special_scaled_modified_bessel_k1",
                                pointwise({{ReduceOp::min}, {{0}}, true}), "decreasing above a bound: f(min(a, b)) = max(f(a), f(b))");
const Register each_increases("aten::logaddexp aten::logaddexp2", pointwise({kExtremes, {{0}, {1}}}), "increasing in each operand");
const Register between("aten::clamp.Tensor aten::clip.Tensor", pointwise({kExtremes, {{0}, {1}, {2}}}), "increasing in each operand");
const Register number("aten::add.Scalar aten::sub.Scalar", std::make_shared<AddNumber>(),
                      "an average of a's plus c is their average plus c; in place, (a + c) + a' = (a + a') + c");
const Register maximum("aten::maximum aten::max.other aten::clamp_min.Tensor",
                       pointwise(KeepsPartial{{ReduceOp::max}, {{0, 1}}} | KeepsPartial{kExtremes, {{0}, {1}}}),
                       "max(max, max) = max; increasing in each operand");
const Register minimum("aten::minimum aten::min.other aten::clamp_max.Tensor",
                       pointwise(KeepsPartial{{ReduceOp::min}, {{0, 1}}} | KeepsPartial{kExtremes, {{0}, {1}}}),
                       "min(min, min) = min; increasing in each operand");

const Register gelu_backward("aten::gelu_backward", std::make_shared<GeluBackward>(), "linear in the incoming gradient");
const Register backward(
    "aten::silu_backward aten::threshold_backward aten::tanh_backward "
    "aten::sigmoid_backward aten::leaky_relu_backward aten::hardtanh_backward aten::hardswish_backward "
    "aten::hardsigmoid_backward aten::elu_backward aten::softplus_backward aten::softshrink_backward "
    "aten::hardshrink_backward aten::mish_backward aten::logit_backward aten::native_dropout_backward aten::rrelu_with_noise_backward "
    "aten::_prelu_kernel_backward aten::_masked_scale",
    kLinear, "linear in the incoming gradient");
const Register log_sigmoid_backward("aten::log_sigmoid_backward",
                                    std::make_shared<MadeAhead>(Order::of_first, KeepsPartial{kSums, {{0}}}),
                                    "linear in the incoming gradient");

const Register plain(
    "aten::abs aten::absolute aten::acos aten::angle aten::asin aten::atanh aten::atan2 aten::add aten::sub "
    "aten::rsub aten::bitwise_and aten::bitwise_or aten::bitwise_xor aten::bitwise_not aten::bitwise_left_shift "
    "aten::bitwise_right_shift aten::celu aten::copysign aten::cos aten::cosh aten::digamma aten::div aten::eq aten::ge "
    "aten::gt aten::le aten::lt aten::ne aten::erfinv aten::fmax aten::fmin aten::fmod aten::frac "
    "aten::floor_divide aten::gcd aten::gelu aten::hardswish aten::heaviside aten::hypot "
    "aten::i0 aten::igamma aten::igammac aten::isfinite aten::isinf aten::isnan aten::isneginf aten::isposinf aten::lcm "
    "aten::lerp aten::lgamma "
    "aten::logical_and aten::logical_not aten::logical_or aten::logical_xor aten::logit aten::masked_fill "
    "aten::mish aten::mul aten::mvlgamma aten::nextafter aten::polar aten::complex aten::polygamma aten::pow "
    "aten::reciprocal aten::remainder aten::sgn aten::sign aten::signbit aten::silu aten::sin aten::sinc aten::softshrink "
    "aten::special_entr aten::special_i0e aten::special_i1 aten::special_i1e "
    "aten::special_ndtri aten::special_xlog1py aten::special_zeta aten::square aten::tan aten::threshold aten::where "
    "aten::_add_relu aten::special_airy_ai aten::special_bessel_j0 "
    "aten::special_bessel_j1 aten::special_bessel_y0 aten::special_bessel_y1 aten::special_chebyshev_polynomial_t "
    "aten::special_chebyshev_polynomial_u aten::special_chebyshev_polynomial_v aten::special_chebyshev_polynomial_w "
    "aten::special_hermite_polynomial_h aten::special_hermite_polynomial_he aten::special_laguerre_polynomial_l "
    "aten::special_legendre_polynomial_p aten::special_modified_bessel_i0 aten::special_modified_bessel_i1 "
    "aten::special_shifted_chebyshev_polynomial_t "
    "aten::special_shifted_chebyshev_polynomial_u aten::special_shifted_chebyshev_polynomial_v "
    "aten::special_shifted_chebyshev_polynomial_w aten::special_spherical_bessel_j0 aten::__ilshift__ aten::__irshift__ "
    "aten::xlogy aten::leaky_relu aten::elu aten::softplus "
    "aten::__and__ aten::__or__ aten::__xor__ aten::__lshift__ aten::__rshift__ aten::float_power "
    "aten::ldexp aten::true_divide",
    kPlain, "each element depends on the elements at its position only");
const Register plain_like("aten::nan_to_num aten::frexp aten::_prelu_kernel", std::make_shared<MadeAhead>(Order::of_first),
                          "each element depends on the elements at its position only");
const Register plain_in_order("aten::log_sigmoid_forward aten::_standard_gamma_grad", std::make_shared<MadeAhead>(Order::row_major),
                              "each element depends on the elements at its position only");

}  // namespace
}  // namespace dtensor::rules
