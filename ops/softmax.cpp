// Softmax of every slice along `dim`. Where `dim` is sharded, ranks reduce the maximum and the sum of each slice: all_reduces of tensors
// without `dim`.
#include "ops/family.hpp"

#include <ATen/OpMathType.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>

#include <limits>

namespace dtensor::rules {
namespace {

// The cut dim and the ranks among which a slice lies.
struct Cut {
  int64_t dim;
  DeviceMesh mesh;
  std::vector<int64_t> mesh_dims;

  // All ranks call it, those without a share of the dim too.
  at::Tensor reduce(const at::Tensor& part, ReduceOp op) const {
    return mesh.communicator(mesh_dims).all_reduce(part.contiguous(), op).get();
  }
  at::Tensor max(const at::Tensor& x) const {
    auto sizes = x.sizes().vec();
    sizes[dim] = 1;
    constexpr auto nothing = -std::numeric_limits<double>::infinity();
    return reduce(x.size(dim) > 0 ? x.amax(dim, true) : at::full(sizes, nothing, x.options()), ReduceOp::max);
  }
  at::Tensor sum(const at::Tensor& x) const { return reduce(x.sum(dim, true), ReduceOp::sum); }
};

enum class Kind { softmax, safe_softmax, log_softmax };

at::Tensor softmax_shards(Kind kind, const at::Tensor& x, const Cut& cut) {
  const auto max = cut.max(x);
  auto shifted = x.sub(max);
  if (kind == Kind::log_softmax) return shifted.sub_(cut.sum(shifted.exp()).log_());
  shifted.exp_();
  shifted.div_(cut.sum(shifted));
  return kind == Kind::softmax ? shifted : shifted.masked_fill_(max.eq(-std::numeric_limits<double>::infinity()), 0);
}

// The dim along which slices run, or -1 for a tensor without dims.
int64_t slice_dim(const Call& call, int operand) {
  const auto& tensor = call.operands[operand];
  return tensor.ndim() == 0 ? -1 : wrap_dim(call.int_arg("dim"), tensor.ndim());
}

// Every dim is free; cutting that of the slices takes `reductions` numbers per slice.
Structure structure(const Call& call, int reductions, KeepsPartial keeps) {
  const auto dims = lettered(call.operands[0].sizes());
  Structure structure{std::vector<Dims>(call.operands.size(), dims), {dims}, {}, std::move(keeps)};
  if (const auto dim = slice_dim(call, 0); dim >= 0) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(at::toOpMathType(call.operands[0].layout->dtype())));
    structure.lowering_bytes = {{static_cast<int>(dim), reductions * bytes * slices(call, 0, dim)}};
  }
  return structure;
}

template <class Compute>
Lowering on_shards(const Call& call, const Resolution& resolution, Compute compute) {
  const auto dim = slice_dim(call, 0);
  auto mesh_dims = dim < 0 ? std::vector<int64_t>() : cutting(resolution.in[0], dim);
  if (mesh_dims.empty()) return {};
  return [cut = Cut{dim, call.mesh, std::move(mesh_dims)}, dtype = call.outputs[0].dtype, compute](LocalCall& local) {
    local.replace({compute(local, cut).to(dtype)});
  };
}

LoweringOf forward(Kind kind) {
  return [kind](const Call& call, const Resolution& resolution) {
    return on_shards(call, resolution, [kind, dtype = call.outputs[0].dtype](LocalCall& local, const Cut& cut) {
      const auto x = kind == Kind::safe_softmax ? local.arg(0).toTensor().to(dtype) : local.arg(0).toTensor();
      return softmax_shards(kind, widened(x), cut);
    });
  };
}

// y (g - sum(g y)), and g - exp(y) sum(g) of the logarithm.
LoweringOf backward(Kind kind) {
  return [kind](const Call& call, const Resolution& resolution) {
    return on_shards(call, resolution, [kind](LocalCall& local, const Cut& cut) {
      const auto gradient = widened(local.arg(0).toTensor()), output = widened(local.arg(1).toTensor());
      if (kind == Kind::log_softmax) return gradient.sub(output.exp().mul_(cut.sum(gradient)));
      const auto product = gradient.mul(output);
      return product.sub(output.mul(cut.sum(product)));
    });
  };
}

RulePtr forward_rule(Kind kind) {
  return family([](const Call& call) { return structure(call, 2, {}); }, forward(kind));
}

RulePtr backward_rule(Kind kind) {
  return family([](const Call& call) { return structure(call, 1, {kSums, {{0}}}); }, backward(kind));
}

const char* const kForward = "slices are independent; a slice's maximum and sum come from its parts";
const char* const kBackward = "as forward, and linear in the incoming gradient";

const Register softmax("aten::_softmax", forward_rule(Kind::softmax), kForward);
const Register safe_softmax("aten::_safe_softmax", forward_rule(Kind::safe_softmax), kForward);
const Register log_softmax("aten::_log_softmax", forward_rule(Kind::log_softmax), kForward);
const Register softmax_backward("aten::_softmax_backward_data", backward_rule(Kind::softmax), kBackward);
const Register log_softmax_backward("aten::_log_softmax_backward_data", backward_rule(Kind::log_softmax), kBackward);

}  // namespace
}  // namespace dtensor::rules
