// Operators on lists of tensors. The i-th elements of all lists belong together, and get the placements of the i-th element of the first
// list.
#include "ops/family.hpp"

#include <ATen/ops/empty_strided.h>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

namespace dtensor::rules {
namespace {

// Operands by list element: [i] is the i-th elements of all lists. Tensors that are no list elements are in none.
std::vector<std::vector<int>> groups_of(const Call& call) {
  std::vector<std::vector<int>> groups;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const int element = call.operands[i].element;
    if (element < 0) continue;
    if (element >= static_cast<int>(groups.size())) groups.resize(element + 1);
    groups[element].push_back(static_cast<int>(i));
  }
  return groups;
}

// Where `operand` lies when a tensor of shape `sizes`, against which it broadcasts, lies as `placement`.
Placement alongside(const Operand& operand, c10::IntArrayRef sizes, const Placement& placement) {
  if (placement.is_flat() && operand.ndim() == 0) return replicate();
  if (!placement.is_shard()) return placement;
  const auto dim = placement.dim - static_cast<int64_t>(sizes.size()) + operand.ndim();
  if (dim < 0 || operand.sizes()[dim] != sizes[placement.dim]) return replicate();
  auto result = placement;
  result.dim = static_cast<int16_t>(dim);
  return result;
}

// Pointwise in each group; `keeps` speaks of the members of a group.
class Foreach final : public Rule {
 public:
  explicit Foreach(KeepsPartial keeps) : keeps_(std::move(keeps)) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    Candidate candidate{Placements(call.operands.size(), replicate()), {}};
    for (const auto& group : groups_of(call)) {
      const auto target = place(call, mesh_dim, group, candidate.in);
      if (!call.schema.returns().empty()) candidate.out.push_back(target);
    }
    return {candidate};
  }

  std::vector<Sizes> output_sizes(const Call& call) const override {
    std::vector<Sizes> all;
    if (call.schema.returns().empty()) return all;
    for (const auto& group : groups_of(call)) {
      Dims shape;
      broadcast(call, group, shape);
      all.emplace_back();
      for (const auto& dim : shape) all.back().push_back(dim.size);
    }
    return all;
  }

 private:
  // Sets the placements of a group's members and returns that of its result.
  Placement place(const Call& call, int64_t mesh_dim, const std::vector<int>& group, Placements& in) const {
    const auto& first = call.operands[group[0]];
    auto target = first.placements()[mesh_dim];
    if (!call.schema.returns().empty() && target.is_replicate()) target = first_cut(call, mesh_dim, group);
    Placements now;
    for (const int i : group) now.push_back(call.operands[i].placements()[mesh_dim]);
    if (const auto kept = fitting(now, call.in_place, !wraps_around(call, group))) {
      for (const auto& [member, placement] : ranges::views::zip(group, kept->in)) in[member] = placement;
      return kept->out[0];
    }
    if (target.is_partial() || (target.is_flat() && !common_flat(call, mesh_dim, group))) return replicate();
    if (target.is_shard() && stretches(call, group)) return replicate();
    for (const int i : group) in[i] = alongside(call.operands[i], first.sizes(), target);
    return target;
  }

  // What passes Partial through: as the operands lie, else as the first does.
  std::optional<Candidate> fitting(const Placements& now, bool in_place, bool extremes) const {
    auto candidates = keeps_.candidates(now, 1, extremes);
    if (in_place) std::erase_if(candidates, [](const Candidate& c) { return c.in[0] != c.out[0]; });
    for (const auto& candidate : candidates) {
      if (candidate.in == now) return candidate;
    }
    for (const auto& candidate : candidates) {
      if (now[0].is_partial() && candidate.in[0] == now[0]) return candidate;
    }
    return {};
  }

  // Whether the result has another shape than the first member.
  static bool stretches(const Call& call, const std::vector<int>& group) {
    Dims shape;
    broadcast(call, group, shape);
    const auto first = call.operands[group[0]].sizes();
    return !std::ranges::equal(shape, first,
                       [](const Dim& dim, int64_t size) { return dim.size == size; });
  }

  // A new result may as well be cut as any member of its own shape is.
  static Placement first_cut(const Call& call, int64_t mesh_dim, const std::vector<int>& group) {
    const auto sizes = call.operands[group[0]].sizes();
    for (const int i : group) {
      const auto& now = call.operands[i].placements()[mesh_dim];
      if (now.cuts() && call.operands[i].sizes() == sizes) return now;
    }
    return replicate();
  }

  KeepsPartial keeps_;
};

// One number per tensor: `combines(order)` says what the numbers of parts combine with, Replicate that they do not.
class ForeachNorm final : public Rule {
 public:
  explicit ForeachNorm(Placement (*combines)(double order)) : combines_(combines) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const auto combined = combines_(call.arg("ord").toScalar().to<double>());
    Candidate candidate{{}, Placements(call.operands.size(), replicate())};
    for (size_t i = 0; i < call.operands.size(); ++i) {
      const auto& now = call.operands[i].placements()[mesh_dim];
      const bool passes =
          combined.is_partial() && (now.cuts() || (now == combined && now.is_partial(ReduceOp::norm2)));
      candidate.in.push_back(passes ? now : replicate());
      if (passes) candidate.out[i] = combined;
    }
    return {candidate};
  }

  std::vector<Sizes> output_sizes(const Call& call) const override { return std::vector<Sizes>(call.operands.size()); }

 private:
  Placement (*combines_)(double order);
};

Placement norms_combine(double order) {
  if (order == 2) return partial(ReduceOp::norm2);
  return order == 1 || order == 0 ? partial() : replicate();
}

Placement sums_combine(double order) { return std::isinf(order) ? replicate() : partial(); }

RulePtr per_index(KeepsPartial keeps = {}) { return std::make_shared<Foreach>(std::move(keeps)); }

// A list over a number or a list of numbers: pending sums pass where none of them is zero.
class ForeachQuotient final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    return (is_divisor(call.arguments.back()) ? scaled_ : plain_)->candidates(call, mesh_dim);
  }
  std::vector<Sizes> output_sizes(const Call& call) const override { return plain_->output_sizes(call); }

 private:
  RulePtr scaled_ = per_index({kSums, {{0}}}), plain_ = per_index();
};

const Register additive(
    "aten::_foreach_add.List aten::_foreach_sub.List",
    per_index(KeepsPartial{kSums, {{0, 1}}} | KeepsPartial{{ReduceOp::avg}, {{0}, {1}}}),
    "linear in the first two lists together");
const Register lerp("aten::_foreach_lerp.Scalar aten::_foreach_lerp.ScalarList",
                    per_index(KeepsPartial{kSums, {{0, 1}}} | KeepsPartial{{ReduceOp::avg}, {{0}, {1}}}),
                    "linear in the first two lists together");
const Register adds_products("aten::_foreach_addcmul aten::_foreach_addcdiv", per_index({{ReduceOp::avg}, {{0}}}),
                             "an average of s's plus c is their average plus c");
const Register number("aten::_foreach_add.Scalar aten::_foreach_add.ScalarList aten::_foreach_sub.Scalar aten::_foreach_sub.ScalarList",
                      per_index({{ReduceOp::avg}, {{0}}}), "an average of a's plus c is their average plus c");
const Register linear("aten::_foreach_mul.Scalar aten::_foreach_mul.ScalarList", per_index({kSums, {{0}}}), "linear in the list");
const Register quotient("aten::_foreach_div.Scalar aten::_foreach_div.ScalarList", std::make_shared<ForeachQuotient>(),
                        "linear in the list, where it is not divided by zero");
const Register negative("aten::_foreach_neg", per_index(KeepsPartial{kSums, {{0}}} | KeepsPartial{kExtremes, {{0}}, true}),
                        "linear, and decreasing");
const Register increasing("aten::_foreach_atan aten::_foreach_ceil aten::_foreach_erf aten::_foreach_exp aten::_foreach_expm1 "
                          "aten::_foreach_floor aten::_foreach_round aten::_foreach_sigmoid aten::_foreach_sinh "
                          "aten::_foreach_tanh aten::_foreach_trunc aten::_foreach_clamp_max.Scalar aten::_foreach_clamp_min.Scalar "
                          "aten::_foreach_maximum.Scalar aten::_foreach_minimum.Scalar aten::_foreach_clamp_max.ScalarList "
                          "aten::_foreach_clamp_min.ScalarList aten::_foreach_maximum.ScalarList aten::_foreach_minimum.ScalarList",
                          per_index({kExtremes, {{0}}}), "increasing: f(max(a, b)) = max(f(a), f(b))");
const Register increasing_above("aten::_foreach_log aten::_foreach_log2 aten::_foreach_log10 aten::_foreach_log1p aten::_foreach_sqrt",
                                per_index({{ReduceOp::min}, {{0}}}), "increasing above a bound: f(min(a, b)) = min(f(a), f(b))");
const Register decreasing_above("aten::_foreach_rsqrt", per_index({{ReduceOp::min}, {{0}}, true}),
                                "decreasing above a bound: f(min(a, b)) = max(f(a), f(b))");
const Register decreasing("aten::_foreach_erfc", per_index({kExtremes, {{0}}, true}), "decreasing");
const Register maximum("aten::_foreach_maximum.List aten::_foreach_clamp_min.List",
                       per_index(KeepsPartial{{ReduceOp::max}, {{0, 1}}} | KeepsPartial{kExtremes, {{0}, {1}}}), "as maximum");
const Register minimum("aten::_foreach_minimum.List aten::_foreach_clamp_max.List",
                       per_index(KeepsPartial{{ReduceOp::min}, {{0, 1}}} | KeepsPartial{kExtremes, {{0}, {1}}}), "as minimum");
const Register moves("aten::_foreach_copy aten::_foreach_copy_", per_index({kAnyPartial, {{0, 1}}}),
                     "the sources are brought to where the destinations lie");
const Register fills("aten::_foreach_zero aten::_foreach_clone", per_index({kAnyPartial, {{0}}}),
                     "any reduction of zeros is zero; a clone is the same");
const Register pointwise(
    "aten::_foreach_abs aten::_foreach_acos aten::_foreach_asin aten::_foreach_cos aten::_foreach_cosh aten::_foreach_frac "
    "aten::_foreach_lgamma aten::_foreach_pow "
    "aten::_foreach_reciprocal aten::_foreach_sign aten::_foreach_sin aten::_foreach_tan "
    "aten::_foreach_add aten::_foreach_sub aten::_foreach_mul aten::_foreach_div aten::_foreach_lerp",
    per_index(), "each element depends on the elements at its position only");
// Optimizers whose kernels go through the memory of all tensors of an index alike, whatever their strides.
class Fused final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return lists_->candidates(call, mesh_dim); }
  std::vector<Sizes> output_sizes(const Call& call) const override { return lists_->output_sizes(call); }
  Lowering lower(const Call&, const Resolution&) const override { return in_one_order; }

 private:
  static at::Tensor in_order_of(const at::Tensor& tensor, const at::Tensor& like) {
    if (tensor.sizes() != like.sizes() || tensor.strides() == like.strides()) return tensor;
    return at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor);
  }

  static void in_one_order(LocalCall& local) {
    const auto& arguments = local.op.schema().arguments();
    const auto parameters = local.arg(0).toTensorVector();
    std::vector<std::pair<at::Tensor, at::Tensor>> written;  // an operand, and its copy
    for (size_t i = 1; i < arguments.size(); ++i) {
      if (!local.arg(i).isTensorList() || local.arg(i).toListRef().size() != parameters.size()) continue;
      auto list = local.arg(i).toTensorVector();
      for (size_t k = 0; k < list.size(); ++k) {
        const auto own = std::exchange(list[k], in_order_of(list[k], parameters[k]));
        if (!own.is_same(list[k]) && arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) written.emplace_back(own, list[k]);
      }
      local.arg(i) = list;
    }
    local.call();
    for (const auto& [own, copy] : written) own.copy_(copy);
  }

  RulePtr lists_ = per_index();
};

const Register fused("aten::_fused_adam_ aten::_fused_adamw_ aten::_fused_sgd_ aten::_fused_adagrad_", std::make_shared<Fused>(),
                     "an optimizer's step is pointwise; its state lies as its parameter");
const Register norms("aten::_foreach_norm", std::make_shared<ForeachNorm>(norms_combine), "as norm, for each tensor");
const Register power_sums("aten::_foreach_powsum", std::make_shared<ForeachNorm>(sums_combine),
                          "sums of powers add up");

}  // namespace
}  // namespace dtensor::rules
