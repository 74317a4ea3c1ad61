// Layer, RMS and group normalization. The normalized dims are whole; gradients of weights sum over all other dims.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

// The dims of a layer norm's tensors: leading dims are free, the last `normalized` ones whole.
struct LayerNorm {
  explicit LayerNorm(const Call& call) {
    const auto& input = *call.operand(call.argument_index("input"));
    const auto leading = input.ndim() - static_cast<int64_t>(call.ints_arg("normalized_shape").size());
    data = lettered(input.sizes());
    statistics = data;
    for (auto d = leading; d < input.ndim(); ++d) {
      data[d].letter = kWhole;
      statistics[d] = {};
      weight.push_back(data[d]);
    }
  }
  Dims data, statistics, weight;
};

// What each operand is, by the name of its argument.
const Dims& dims_of(const LayerNorm& norm, std::string_view argument) {
  if (argument == "mean" || argument == "rstd") return norm.statistics;
  return argument == "weight" || argument == "bias" ? norm.weight : norm.data;
}

std::vector<Dims> operands(const Call& call, const LayerNorm& norm) {
  std::vector<Dims> in;
  for (const auto& operand : call.operands)
    in.push_back(dims_of(norm, call.schema.arguments()[operand.argument].name()));
  return in;
}

Structure forward(const Call& call) {
  const LayerNorm norm(call);
  std::vector<Dims> out(call.schema.returns().size(), norm.statistics);
  out[0] = norm.data;
  return {operands(call, norm), std::move(out), {}, {}};
}

// The gradients that the mask does not ask for.
std::vector<int> masked_out(const Call& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  std::vector<int> undefined;
  for (int i = 0; i < static_cast<int>(mask.size()); ++i) {
    if (!mask[i]) undefined.push_back(i);
  }
  return undefined;
}

Structure backward(const Call& call) {
  const LayerNorm norm(call);
  std::vector<Dims> out(call.schema.returns().size(), norm.weight);
  out[0] = norm.data;
  const Placements sums(out.size(), partial());
  Structure structure{operands(call, norm), std::move(out), sums, {kSums, {{0}}}};
  structure.undefined = masked_out(call);
  return structure;
}

// -- Group norm: arguments N, C and HxW speak of the whole input ------------------------------------------------------

// Statistics are [N, group], weights [C]; groups are made of channels, so only the batch is free.
Structure group_forward(const Call& call) {
  const auto& input = call.operands[0];
  auto data = without_letters(input.sizes());
  data[0].letter = 0;
  const Dims statistics{{0, input.sizes()[0]}, {kWhole, call.int_arg("group")}};
  Structure structure{{data}, {data, statistics, statistics}, {}, {}};
  for (size_t i = 1; i < call.operands.size(); ++i) structure.in.push_back(without_letters(call.operands[i].sizes()));
  return structure;
}

Structure group_backward(const Call& call) {
  const auto& input = *call.operand(call.argument_index("input"));
  auto data = without_letters(input.sizes());
  data[0].letter = 0;
  const Dims weight{{kWhole, call.int_arg("C")}};
  Structure structure{{}, {data, weight, weight}, Placements(3, partial()), {kSums, {{0}}}};
  for (const auto& operand : call.operands) {
    const auto& name = call.schema.arguments()[operand.argument].name();
    auto dims = name == "weight" ? weight : lettered(operand.sizes(), 0);
    for (size_t d = 1; d < dims.size(); ++d) dims[d].letter = kWhole;
    structure.in.push_back(std::move(dims));
  }
  structure.undefined = masked_out(call);
  return structure;
}

// N is local, and tensors are row-major, as the kernels take them to be: on one device they are, but a part may be a view.
Lowering local_batch(const Call& call, const Resolution& resolution) {
  const auto batch = resolution.in[call.operand_index(call.argument_index("input"))]->local_sizes()[0];
  return [position = call.argument_index("N"), batch](LocalCall& local) {
    for (size_t i = 0; i < local.originals.size(); ++i) {
      auto& value = local.arg(i);
      if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().contiguous();
    }
    local.arg(position) = batch;
    local.call();
  };
}

// -- Weight norm: v scaled by g over its norm, per slice of dim (the first or the last) ------------------------------------

Structure weight_norm(const Call& call) {
  const auto& v = call.operands[call.operands.size() == 2 ? 0 : 1];
  auto data = without_letters(v.sizes());
  const auto dim = wrap_dim(call.int_arg("dim"), v.ndim());
  data[dim].letter = 0;
  auto scale = data;
  for (size_t d = 0; d < scale.size(); ++d) scale[d].size = static_cast<int64_t>(d) == dim ? scale[d].size : 1;
  if (call.operands.size() == 2) return {{data, scale}, {data, scale}, {}, {}};
  return {{data, data, scale, scale}, {data, scale}, {}, {kSums, {{0}}}};
}

class WeightNorm final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return slices_->candidates(call, mesh_dim); }

  // The norms of slices of 16 bits are floats.
  std::vector<OutputMeta> output_metas(const Call& call) const override {
    auto metas = slices_->output_metas(call);
    const auto dtype = call.operands.back().layout->dtype();
    if (call.operands.size() == 2 && (dtype == at::kBFloat16 || dtype == at::kHalf)) metas[1].dtype = at::kFloat;
    return metas;
  }

  // The kernel writes the norms row-major, whatever the order of g that they are to have.
  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const auto in_order = [](LocalCall& local) {
      local.arg(1) = local.arg(1).toTensor().contiguous();
      local.call();
    };
    return zeros_of_nothing(call, resolution, call.operands.size() == 2 ? Lowering(in_order) : Lowering());
  }

 private:
  RulePtr slices_ = family(weight_norm);
};

// libtorch's meta function says row-major where its kernel keeps channels last.
class GroupNorm final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return samples_->candidates(call, mesh_dim); }
  bool describes_outputs() const override { return true; }

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    auto metas = samples_->output_metas(call);
    metas[0].strides = strides_like(metas[0].sizes, *call.operands[0].layout);
    for (const auto& operand : call.operands) {  // the statistics of short floats beside weights of float32 are as the weights
      for (size_t i = 1; i < metas.size(); ++i) metas[i].dtype = operand.layout->dtype();
    }
    return metas;
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override { return samples_->lower(call, resolution); }

 private:
  RulePtr samples_ = family(group_forward, local_batch);
};

const Register weight_normed("aten::_weight_norm_interface aten::_weight_norm_interface_backward", std::make_shared<WeightNorm>(),
                             "slices of the kept dim are independent");
const Register layer("aten::native_layer_norm aten::_fused_rms_norm", family(forward),
                     "every position of the leading dims is normalized by itself");
const Register layer_backward("aten::native_layer_norm_backward aten::_fused_rms_norm_backward", family(backward),
                              "linear in the incoming gradient; gradients of weights sum over positions");
const Register group("aten::native_group_norm", std::make_shared<GroupNorm>(), "every sample is normalized by itself");
const Register group_grad("aten::native_group_norm_backward", family(group_backward, local_batch),
                          "linear in the incoming gradient; gradients of weights sum over samples");

}  // namespace
}  // namespace dtensor::rules
