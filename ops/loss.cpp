// Losses: pointwise terms, and then no reduction, a sum, or a mean over the global batch.
#include "ops/family.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/ops/div.h>
#include <ATen/ops/new_full.h>
#include <ATen/ops/sum.h>
#include <range/v3/action/push_back.hpp>
#include <range/v3/numeric/iota.hpp>

#include <algorithm>
#include <exception>
#include <limits>

namespace dtensor::rules {
namespace {

enum : int64_t { kNone = 0, kMean = 1, kSum = 2 };  // at::Reduction

// -- Negative log likelihood ------------------------------------------------------------------------------------------

constexpr int kClass = 100;  // letter of the class dim; those of the others count from 0

// Data is [batch, classes, ...]; target has no class dim, and neither has the loss where it is not reduced.
struct Nll {
  explicit Nll(const Call& call) {
    const auto& input = *call.operand(call.argument_index("self"));
    data = lettered(input.sizes());
    class_dim = input.ndim() == 1 ? 0 : 1;
    if (input.ndim() > 0) data[class_dim].letter = kClass;
    target = data;
    target.erase(target.begin() + class_dim);
    if (input.ndim() > 0) weight = {data[class_dim]};
  }
  Dims data, target, weight;
  int64_t class_dim;
};

Structure nll_forward(const Call& call) {
  const Nll nll(call);
  const bool reduced = call.int_arg("reduction") != kNone;
  Structure structure{{nll.data, nll.target}, {reduced ? Dims() : nll.target, Dims()}, {partial(), partial()}, {}};
  if (call.operands.size() > 2) structure.in.push_back(nll.weight);
  if (call.int_arg("reduction") != kMean) return structure;
  structure.lacking[1] = replicate();
  const auto bytes = static_cast<int64_t>(c10::elementSize(call.operands[0].layout->dtype()));
  for (const auto& dim : nll.data) structure.lowering_bytes.emplace_back(dim.letter, bytes);
  return structure;
}

// What a rank that has some of the classes does first: targets of classes that it lacks are ignored, the others become its own
// positions.
using OwnTargets = std::function<void(LocalCall&)>;

OwnTargets own_targets(const Call& call, const Resolution& resolution) {
  const auto& data = resolution.in[call.operand_index(call.argument_index("self"))];
  const auto class_dim = Nll(call).class_dim;
  if (cutting(data, class_dim).empty()) return {};
  return [held = data->intervals(class_dim, call.mesh.coordinate()), classes = data->sizes()[class_dim], op = call.schema.name(),
          ignored = call.int_arg("ignore_index"), target = call.argument_index("target"),
          ignore_index = call.argument_index("ignore_index")](LocalCall& local) {
    const auto labels = local.arg(target).toTensor().to(at::kLong);  // bytes have no -1
    const auto is_ignored = labels.eq(ignored);
    check_positions(op, labels.masked_select(is_ignored.logical_not()), classes, "Target {} is out of bounds.");
    local.arg(target) = own_rows(labels, held, -1).masked_fill_(is_ignored, -1);
    local.arg(ignore_index) = -1;
  };
}

constexpr double kWrong = -std::numeric_limits<double>::infinity();  // a total weight that no weights have

// The mean divides by the weight of the whole batch, which takes one reduction of one number over the mesh dimensions that have
// different terms of it.
std::vector<int64_t> summed_over(const Call& call, const Resolution& resolution) {
  auto dims = cutting(resolution.in[1]);
  const auto classes = cutting(resolution.in[0], Nll(call).class_dim);
  ranges::push_back(dims, classes);
  std::ranges::sort(dims);
  return dims;
}

Lowering nll_shards(const Call& call, const Resolution& resolution) {
  const auto own = own_targets(call, resolution);
  const auto dims = summed_over(call, resolution);
  const bool mean = call.int_arg("reduction") == kMean && !dims.empty();
  if (!own && !mean) return {};
  const auto sums = [own, mean, reduction = call.argument_index("reduction")](LocalCall& local) {
    if (own) own(local);
    if (mean) local.arg(reduction) = kSum;
    local.call();
  };
  if (!mean) return sums;
  return [sums, mesh = call.mesh, dims, op = call.schema.name()](LocalCall& local) {
    // Only the ranks that have a target which is no class see it. The others must not wait for them, and learn of it here.
    auto part = local.arg(0).toTensor().new_full({}, kWrong);
    std::exception_ptr error;
    try {
      sums(local);
      part = local.arg(1).toTensor();
    } catch (...) {
      error = std::current_exception();
    }
    const auto weight = mesh.communicator(dims).all_reduce(part, ReduceOp::sum).get();
    if (error) std::rethrow_exception(error);
    if (weight.is_cpu() && weight.item<double>() == kWrong) fail(op, "a target is out of bounds on another rank");
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
    } else if (name == "weight") {
      structure.in.push_back(nll.weight);
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

Lowering nll_backward_shards(const Call& call, const Resolution& resolution) {
  const auto own = own_targets(call, resolution);
  if (!own) return {};
  return [own](LocalCall& local) {
    own(local);
    local.call();
  };
}

// -- Pointwise losses -------------------------------------------------------------------------------------------------

std::vector<int> from(int first, size_t last) {
  std::vector<int> numbers(last - first);
  ranges::iota(numbers, first);
  return numbers;
}

Structure pointwise_forward(const Call& call) {
  Dims result;
  auto in = broadcast(call, from(0, call.operands.size()), result);
  const bool reduced = call.int_arg("reduction") != kNone;
  Structure structure{std::move(in), {reduced ? Dims() : result}, {partial()}, {}};
  if (!reduced) structure.strides = {pointwise_meta(call).strides};
  if (call.schema.name() == "aten::binary_cross_entropy_with_logits")
    structure.dtype = call.operands[1].layout->dtype();  // it begins with 1 - target
  return structure;
}

// (Of whole numbers the mean's weight is one too, rounded: parts would not know it.)
Structure pointwise_backward(const Call& call) {
  if (!at::isFloatingType(call.operand(call.argument_index("self"))->layout->dtype())) return senseless(call);
  Dims result;
  auto in = broadcast(call, from(0, call.operands.size()), result);
  return {std::move(in), {result}, {}, {kSums, {{0}}}};
}

bool any_cut(const Resolution& resolution) {
  return std::ranges::any_of(resolution.in,
                     [](const LayoutPtr& l) { return !cutting(l).empty(); });
}

// What the terms are counted by: the loss has the broadcast shape, the gradient goes by its input, as ATen does.
Sizes counted_sizes(const Call& call) {
  if (call.has("grad_output")) return Sizes(call.operand(call.argument_index("self"))->sizes());
  Dims result;
  broadcast(call, from(0, call.operands.size()), result);
  Sizes sizes;
  for (const auto& dim : result) sizes.push_back(dim.size);
  return sizes;
}

// A mean over parts: their sum over the global count. The same for the gradient, which is linear in the reduction's
// weight. Of half precision, which could not hold the sum, it is made in float.
Lowering mean_of_shards(const Call& call, const Resolution& resolution) {
  if (call.int_arg("reduction") != kMean || !any_cut(resolution)) return {};
  int64_t count = 1;
  for (const auto size : counted_sizes(call)) count *= size;
  return [count, dtype = call.outputs[0].dtype, reduction = call.argument_index("reduction")](LocalCall& local) {
    for (int i = 0; i < reduction; ++i) {
      if (local.arg(i).isTensor() && local.arg(i).toTensor().defined()) local.arg(i) = widened(local.arg(i).toTensor());
    }
    local.arg(reduction) = kSum;
    local.call();
    local.arg(0) = local.arg(0).toTensor().div(count).to(dtype);
  };
}

// -- Losses of rows ----------------------------------------------------------------------------------------------------

// Data is [batch, classes] or [classes]; every row is needed whole.
Dims row_dims(const Operand& operand, int64_t data_ndim) {
  auto dims = without_letters(operand.sizes());
  if (data_ndim == 2 && !dims.empty()) dims[0].letter = 0;
  return dims;
}

Structure rows_forward(const Call& call) {
  const auto& self = call.operands[0];
  Structure structure;
  for (const auto& operand : call.operands) {
    const bool weight = operand.argument == call.argument_index("weight");
    structure.in.push_back(weight ? without_letters(operand.sizes()) : row_dims(operand, self.ndim()));
  }
  const bool reduced = call.int_arg("reduction") != kNone || self.ndim() < 2;
  structure.out = {reduced ? Dims() : Dims{{0, self.sizes()[0]}}};
  structure.lacking = {partial()};
  if (call.schema.returns().size() > 1) {  // which classes are targets
    structure.out.push_back(structure.in[1]);
    structure.lacking.push_back(replicate());
  }
  return structure;
}

Structure rows_backward(const Call& call) {
  const auto& self = *call.operand(call.argument_index("self"));
  Structure structure{{}, {row_dims(self, self.ndim())}, {}, {kSums, {{0}}}};
  for (const auto& operand : call.operands) {
    const bool weight = operand.argument == call.argument_index("weight");
    structure.in.push_back(weight ? without_letters(operand.sizes()) : row_dims(operand, self.ndim()));
  }
  return structure;
}

// A mean over a cut batch: the sum over the global number of rows. Kernels leave the loss of no rows as it was in memory.
Lowering mean_of_rows(const Call& call, const Resolution& resolution) {
  const auto& self = *call.operand(call.argument_index("self"));
  if (!any_cut(resolution)) return {};
  if (auto zeros = zeros_of_nothing(call, resolution)) return zeros;
  if (call.int_arg("reduction") != kMean) return {};
  return [count = self.sizes()[0], reduction = call.argument_index("reduction")](LocalCall& local) {
    local.arg(reduction) = kSum;
    local.call();
    local.arg(0) = local.arg(0).toTensor().div(count);
  };
}

// -- The table -------------------------------------------------------------------------------------------------------

const Register nll("aten::nll_loss_forward aten::nll_loss2d_forward", family(nll_forward, nll_shards),
                   "a sample's loss is on the rank of its target's class and 0 on others; losses and weights of samples add up");
const Register nll_grad("aten::nll_loss_backward aten::nll_loss2d_backward", family(nll_backward, nll_backward_shards),
                        "samples and classes are independent given the total weight; linear in the incoming gradient");
const Register rows("aten::multi_margin_loss aten::multilabel_margin_loss_forward", family(rows_forward, mean_of_rows),
                    "rows are independent, and their losses add up");
const Register rows_gradient("aten::multi_margin_loss_backward aten::multilabel_margin_loss_backward",
                             family(rows_backward, mean_of_rows), "rows are independent; linear in the incoming gradient");
const Register sequences("aten::_ctc_loss aten::_ctc_loss_backward", replicated(), "alignments run along whole sequences of own lengths");
const Register pointwise_loss(
    "aten::mse_loss aten::huber_loss aten::smooth_l1_loss aten::soft_margin_loss "
    "aten::binary_cross_entropy aten::binary_cross_entropy_with_logits",
    family(pointwise_forward, mean_of_shards), "terms are pointwise and add up");
const Register pointwise_grad(
    "aten::mse_loss_backward aten::huber_loss_backward aten::smooth_l1_loss_backward "
    "aten::soft_margin_loss_backward aten::binary_cross_entropy_backward",
    family(pointwise_backward, mean_of_shards), "pointwise; linear in the incoming gradient");

}  // namespace
}  // namespace dtensor::rules
