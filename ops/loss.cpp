// Losses: pointwise terms, then no reduction, a sum, or a mean over the global batch.
#include "ops/family.hpp"

#include <ATen/ops/div.h>
#include <ATen/ops/sum.h>

#include <numeric>

namespace dtensor::rules {
namespace {

enum : int64_t { kNone = 0, kMean = 1, kSum = 2 };  // at::Reduction

// -- Negative log likelihood ------------------------------------------------------------------------------------------

// Data is [batch, classes, ...]; target has no class dim, and neither has the loss where it is not reduced.
struct Nll {
  explicit Nll(const Call& call) {
    const auto& input = *call.operand(call.argument_index("self"));
    data = lettered(input.sizes());
    const int64_t classes = input.ndim() == 1 ? 0 : 1;
    if (input.ndim() > 0) data[classes].letter = kWhole;
    target = data;
    target.erase(target.begin() + classes);
  }
  Dims data, target;
};

Structure nll_forward(const Call& call) {
  const Nll nll(call);
  const bool reduced = call.int_arg("reduction") != kNone;
  Structure structure{{nll.data, nll.target}, {reduced ? Dims() : nll.target, Dims()}, {partial(), partial()}, {}};
  if (call.int_arg("reduction") == kMean) structure.lacking[1] = replicate();
  if (call.operands.size() > 2) structure.in.push_back(without_letters(call.operands[2].sizes()));
  return structure;
}

// The mesh dimensions that cut `layout`.
std::vector<int64_t> cutting(const LayoutPtr& layout) {
  std::vector<int64_t> dims;
  for (int64_t m = 0; m < layout->mesh().ndim(); ++m) {
    if (layout->placements()[m].is_shard() && layout->mesh().size(m) > 1) dims.push_back(m);
  }
  return dims;
}

// The mean divides by the weight of the whole batch, which takes one reduction of one number.
Lowering nll_mean(const Call& call, const Resolution& resolution) {
  const auto dims = cutting(resolution.in[1]);
  if (call.int_arg("reduction") != kMean || dims.empty()) return {};
  return [mesh = call.mesh, dims, reduction = call.argument_index("reduction")](LocalCall& local) {
    local.arg(reduction) = kSum;
    local.call();
    const auto weight = mesh.communicator(dims).all_reduce(local.arg(1).toTensor(), ReduceOp::sum).get();
    local.arg(0) = local.arg(0).toTensor().div(weight);
    local.arg(1) = weight;
  };
}

Structure nll_backward(const Call& call) {
  const Nll nll(call);
  Structure structure{{}, {nll.data}, {}, {}};
  for (const auto& operand : call.operands) {
    const auto& name = call.schema.arguments()[operand.argument].name();
    if (name == "self") {
      structure.in.push_back(nll.data);
    } else if (name == "target" || (name == "grad_output" && operand.ndim() > 0)) {
      structure.in.push_back(nll.target);
    } else {
      structure.in.push_back(without_letters(operand.sizes()));
    }
  }
  structure.keeps = {kSums, {{0}}};
  if (call.int_arg("reduction") != kMean) structure.unread = {call.operand_index(call.argument_index("total_weight"))};
  return structure;
}

// -- Pointwise losses -------------------------------------------------------------------------------------------------

std::vector<int> from(int first, size_t last) {
  std::vector<int> numbers(last - first);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

Structure pointwise_forward(const Call& call) {
  Dims result;
  auto in = broadcast(call, from(0, call.operands.size()), result);
  const bool reduced = call.int_arg("reduction") != kNone;
  Structure structure{std::move(in), {reduced ? Dims() : result}, {partial()}, {}};
  if (!reduced) structure.strides = {pointwise_meta(call).strides};
  return structure;
}

Structure pointwise_backward(const Call& call) {
  Dims result;
  auto in = broadcast(call, from(0, call.operands.size()), result);
  return {std::move(in), {result}, {}, {kSums, {{0}}}};
}

bool any_cut(const Resolution& resolution) {
  return std::any_of(resolution.in.begin(), resolution.in.end(),
                     [](const LayoutPtr& l) { return !cutting(l).empty(); });
}

// A mean over parts: their sum over the global count. The same for the gradient, which is linear in the reduction's
// weight.
Lowering mean_of_parts(const Call& call, const Resolution& resolution) {
  if (call.int_arg("reduction") != kMean || !any_cut(resolution)) return {};
  Dims result;
  broadcast(call, from(0, call.operands.size()), result);
  int64_t count = 1;
  for (const auto& dim : result) count *= dim.size;
  return [count, reduction = call.argument_index("reduction")](LocalCall& local) {
    local.arg(reduction) = kSum;
    local.call();
    local.arg(0) = local.arg(0).toTensor().div(count);
  };
}

const Register nll("aten::nll_loss_forward aten::nll_loss2d_forward", family(nll_forward, nll_mean),
                   "a sample's loss needs its row of classes; losses and weights of samples add up");
const Register nll_grad("aten::nll_loss_backward aten::nll_loss2d_backward", family(nll_backward),
                        "samples are independent given the total weight; linear in the incoming gradient");
const Register pointwise_loss(
    "aten::mse_loss aten::huber_loss aten::smooth_l1_loss aten::soft_margin_loss "
    "aten::binary_cross_entropy aten::binary_cross_entropy_with_logits",
    family(pointwise_forward, mean_of_parts), "terms are pointwise and add up");
const Register pointwise_grad(
    "aten::mse_loss_backward aten::huber_loss_backward aten::smooth_l1_loss_backward "
    "aten::soft_margin_loss_backward aten::binary_cross_entropy_backward",
    family(pointwise_backward, mean_of_parts), "pointwise; linear in the incoming gradient");

}  // namespace
}  // namespace dtensor::rules
