// Convolution, its transpose, and their gradients. Samples are independent, channels work as in a matrix product, and positions need
// a halo of their neighbours.
#include "ops/halo.hpp"

#include "ops/family.hpp"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <set>

namespace dtensor::rules {
namespace {

// The part that an operand or result plays; a gradient plays the part of what it is the gradient of.
enum Part : int { kInput, kWeight, kBias, kOutput, kParts };

// The arguments of any of the convolutions, by their names.
struct Convolution {
  explicit Convolution(const Call& call) {
    for (int i = 0; i < static_cast<int>(call.operands.size()); ++i) {
      const auto part = part_of(call.schema.arguments()[call.operands[i].argument].name());
      parts.push_back(part);
      operand[part] = i;
    }
    if (operand[kInput] < 0 || operand[kWeight] < 0) return;
    const auto& weight = call.operands[operand[kWeight]];
    spatial = weight.ndim() - 2;
    regular = spatial > 0 && call.operands[operand[kInput]].ndim() == weight.ndim();
    if (!regular) return;
    const auto ints = [&](std::string_view name, int64_t otherwise) {
      auto values = call.has(name) ? call.ints_arg(name) : std::vector<int64_t>{otherwise};
      regular = regular && (values.size() == 1 || values.size() == static_cast<size_t>(spatial));
      values.resize(spatial, values.empty() ? otherwise : values[0]);
      return values;
    };
    stride = ints("stride", 1), padding = ints("padding", 0), dilation = ints("dilation", 1);
    output_padding = ints("output_padding", 0);
    transposed = call.has("transposed") ? call.bool_arg("transposed") : call.schema.name().find("transpose") != std::string::npos;
    const auto input = call.operands[operand[kInput]].sizes();
    const bool depthwise = call.schema.name().find("depthwise") != std::string::npos;
    groups = call.has("groups") ? call.int_arg("groups") : depthwise ? input[1] : 1;
    for (int64_t i = 0; i < spatial; ++i) windows.push_back({weight.sizes()[2 + i], stride[i], padding[i], dilation[i]});
    // Some kernels go by `kernel_size` where the weight has other windows.
    const bool same = !call.has("kernel_size") || c10::IntArrayRef(ints("kernel_size", 1)) == weight.sizes().slice(2);
    const auto dtype = call.operands[operand[kInput]].layout->dtype();  // some kernels take others beside it
    const bool one_dtype = std::ranges::all_of(call.operands, [&](const auto& o) { return o.layout->dtype() == dtype; });
    regular = regular && same && one_dtype && fits(call);
  }

  static Part part_of(std::string_view argument) {
    if (argument == "weight" || argument == "bias") return argument == "weight" ? kWeight : kBias;
    return argument == "grad_output" ? kOutput : kInput;
  }

  bool is_backward() const { return operand[kOutput] >= 0; }
  // The dims of the weight. With groups one of them counts the channels of a group.
  int64_t input_channels() const { return transposed ? 0 : 1; }
  int64_t output_channels() const { return transposed ? 1 : 0; }

  Sizes output_sizes(const Call& call) const {
    const auto input = call.operands[operand[kInput]].sizes(), weight = call.operands[operand[kWeight]].sizes();
    Sizes sizes{input[0], transposed ? weight[1] * groups : weight[0]};
    for (int64_t i = 0; i < spatial; ++i) {
      const auto& w = windows[i];
      const auto length = length_of(call, i), reach = w.dilation * (w.kernel - 1) + 1;
      sizes.push_back(transposed ? (length - 1) * w.stride - 2 * w.padding + reach + output_padding[i]
                                 : (length + 2 * w.padding - reach) / w.stride + 1);
    }
    return sizes;
  }

  // Whether operands and arguments fit each other; the kernel says what is wrong with those that do not. No out= form.
  bool regular = false;
  int operand[kParts] = {-1, -1, -1, -1};
  std::vector<Part> parts;  // of the operands
  int64_t spatial = 0, groups = 1;
  bool transposed = false;
  std::vector<int64_t> stride, padding, dilation, output_padding;
  std::vector<Window> windows;

 private:
  int64_t length_of(const Call& call, int64_t i) const { return call.operands[operand[kInput]].sizes()[2 + i]; }

  bool fits(const Call& call) const {
    const auto sizes = [&](Part part) { return call.operands[operand[part]].sizes(); };
    for (int64_t i = 0; i < spatial; ++i) {
      const auto& w = windows[i];
      if (w.stride < 1 || w.padding < 0 || w.dilation < 1 || w.kernel < 1 || output_padding[i] < 0) return false;
      if (transposed && output_padding[i] >= std::max(w.stride, w.dilation)) return false;
      if (!transposed && length_of(call, i) + 2 * w.padding < w.dilation * (w.kernel - 1) + 1) return false;
    }
    const auto input = sizes(kInput), weight = sizes(kWeight);
    if (input[1] == 0) return false;  // of no channels some of libtorch's forms make none
    if (groups < 1 || weight[0] % groups != 0 || input[1] != (transposed ? weight[0] : weight[1] * groups)) return false;
    const auto output = output_sizes(call);
    if (operand[kBias] >= 0 && sizes(kBias) != c10::IntArrayRef(output[1])) return false;
    if (is_backward() && sizes(kOutput) != c10::IntArrayRef(output)) return false;
    return std::ranges::all_of(output, [](int64_t n) { return n >= 0; });
  }
};

// -- Candidates -------------------------------------------------------------------------------------------------------

// Placements of input, weight, bias and output under which the local convolution is right.
struct Way {
  Placement at[kParts];
  int64_t bytes = 0;
};

// The cuts that operands have now, and the plain one.
using Cuts = std::set<Cut>;
Cuts cuts_of(const Call& call, int64_t mesh_dim, const Convolution& conv, std::initializer_list<std::pair<Part, int64_t>> dims) {
  Cuts cuts{Cut()};
  for (const auto& [part, dim] : dims) {
    if (conv.operand[part] < 0) continue;
    const auto& now = call.operands[conv.operand[part]].placements()[mesh_dim];
    if (now.is_shard(dim)) cuts.insert(now.cut());
  }
  return cuts;
}

void add_channels(const Call& call, int64_t mesh_dim, const Convolution& conv, std::vector<Way>& ways) {
  const auto in = conv.input_channels(), out = conv.output_channels();
  for (const auto& cut : cuts_of(call, mesh_dim, conv, {{kInput, 1}, {kWeight, in}})) {
    ways.push_back({{shard(1, cut), shard(in, cut), replicate(), partial()}});
  }
  for (const auto& cut : cuts_of(call, mesh_dim, conv, {{kOutput, 1}, {kWeight, out}, {kBias, 0}})) {
    const auto channels = shard(1, cut);
    ways.push_back({{replicate(), shard(out, cut), shard(0, cut), channels}});
  }
}

// Whole groups of channels, each with its own filters.
void add_groups(const Call& call, const Convolution& conv, std::vector<Way>& ways) {
  const auto weight = call.operands[conv.operand[kWeight]].sizes();
  const auto rows = weight[0] / conv.groups;  // the channels of a group on one side
  const auto in = conv.transposed ? rows : weight[1], out = conv.transposed ? weight[1] : rows;
  const auto cut = [](int64_t dim, int64_t unit) { return strided_shard(dim, 1, unit); };
  ways.push_back({{cut(1, in), cut(0, rows), cut(0, out), cut(1, out)}});
}

// The transpose reads its output where the convolution reads its input. A gradient fetches what was read and gives its gradient
// back.
void add_positions(const Call& call, int64_t mesh_dim, const Convolution& conv, std::vector<Way>& ways) {
  const auto& input = call.operands[conv.operand[kInput]];
  const auto output = conv.output_sizes(call);
  const auto read = conv.transposed ? c10::IntArrayRef(output) : input.sizes();
  const int64_t times = conv.is_backward() && !conv.transposed ? 2 : 1;
  for (int64_t i = 0; i < conv.spatial; ++i) {
    const auto dim = 2 + i, windows = conv.transposed ? input.sizes()[dim] : output[dim];
    const auto bytes = times * halo_bytes(call, mesh_dim, input, read, windows, dim, conv.windows[i]);
    ways.push_back({{shard(dim), replicate(), replicate(), shard(dim)}, bytes});
  }
}

std::vector<Way> ways(const Call& call, int64_t mesh_dim, const Convolution& conv) {
  std::vector<Way> all;
  for (const auto& cut : cuts_of(call, mesh_dim, conv, {{kInput, 0}, {kOutput, 0}})) {
    const auto samples = shard(0, cut);
    all.push_back({{samples, replicate(), replicate(), samples}});
  }
  if (conv.groups == 1) {
    add_channels(call, mesh_dim, conv, all);
  } else {
    add_groups(call, conv, all);
  }
  add_positions(call, mesh_dim, conv, all);
  return all;
}

Placement gradient_of(const Way& way, Part part) {
  if (way.at[part].is_shard()) return way.at[part];
  return way.at[kOutput].is_shard() ? partial() : replicate();
}

// -- The local call ---------------------------------------------------------------------------------------------------

// What is different on a rank.
struct Share {
  Halos halos;
  bool transposed;
  std::vector<int64_t> padding, output_padding;  // none where there is a halo: it comes with the fetched values
  int64_t groups;
  int padding_at, output_padding_at, groups_at;  // arguments

  Share(const Call& call, const Convolution& conv, const LayoutPtr& input, const LayoutPtr& output)
      : halos(conv.transposed ? output : input, conv.transposed ? input : output, 2, conv.windows),
        transposed(conv.transposed),
        padding(conv.padding),
        output_padding(conv.output_padding),
        groups(conv.groups * input->local_sizes()[1] / std::max<int64_t>(input->sizes()[1], 1)),
        padding_at(call.argument_index("padding")),
        output_padding_at(call.argument_index("output_padding")),
        groups_at(call.argument_index("groups")) {
    if (conv.groups == 1) groups = 1;
    for (const auto& halo : halos) padding[halo.dim() - 2] = output_padding[halo.dim() - 2] = 0;
  }

  void set_arguments(LocalCall& local) const {
    local.arg(padding_at) = padding;
    if (output_padding_at >= 0) local.arg(output_padding_at) = output_padding;
    if (groups_at >= 0) local.arg(groups_at) = groups;
  }
};

// A bias counts once in a sum over input channels.
bool is_first(const Call& call, const Placements& output) {
  for (int64_t m = 0; m < call.mesh.ndim(); ++m) {
    if (output[m].is_partial(ReduceOp::sum) && call.mesh.coordinate(m) > 0) return false;
  }
  return true;
}

at::Tensor with_bias(const at::Tensor& output, const at::Tensor& bias) {
  if (!bias.defined()) return output;
  std::vector<int64_t> shape(output.dim(), 1);
  shape[1] = -1;
  return output.add(bias.view(shape));
}

bool nothing_differs(const Convolution& conv, const Share& share) { return share.halos.empty() && share.groups == conv.groups; }

Lowering lower_forward(const Call& call, const Resolution& resolution, const Convolution& conv) {
  const auto input = resolution.in[conv.operand[kInput]], output = output_layout(call, resolution, 0);
  const Share share(call, conv, input, output);
  const bool first = is_first(call, resolution.out[0]), whole = !is_empty(input->local_sizes()) && !is_empty(output->local_sizes());
  if (first && whole && nothing_differs(conv, share)) return {};
  const auto at = [&](Part part) { return conv.operand[part] < 0 ? -1 : call.operands[conv.operand[part]].argument; };
  const auto sizes = conv.transposed ? share.halos.read_sizes(output->local_sizes()) : output->local_sizes().vec();
  return [share, first, sizes, input = at(kInput), bias = at(kBias)](LocalCall& local) {
    auto x = local.arg(input).toTensor();
    const auto b = bias >= 0 && first ? local.arg(bias).toTensor() : at::Tensor();
    if (!share.transposed) x = share.halos.fetch(x, 0);
    const bool nothing = is_empty(x.sizes()) || is_empty(sizes), adds = nothing || share.transposed;
    if (nothing) {
      local.replace({x.new_zeros(sizes)});
    } else {
      local.arg(input) = x;
      if (bias >= 0 && (adds || !first)) local.arg(bias) = c10::IValue();
      share.set_arguments(local);
      local.call();
    }
    auto y = local.arg(0).toTensor();
    if (share.transposed) y = share.halos.give_back(y);
    local.replace({adds ? with_bias(y, b) : y});
  };
}

at::Tensor sum_of_channels(const at::Tensor& gradient) {
  std::vector<int64_t> others{0};
  for (int64_t d = 2; d < gradient.dim(); ++d) others.push_back(d);
  return gradient.sum(others);
}

// Kernels may leave something where no gradient was asked for.
Lowering without_unasked(const Call& call) {
  const auto mask = call.arg("output_mask").toBoolList();
  if (mask[0] && mask[1] && mask[2]) return {};
  return [mask](LocalCall& local) {
    local.call();
    for (size_t i = 0; i < mask.size(); ++i) {
      if (!mask[i]) local.arg(i) = at::Tensor();
    }
  };
}

Lowering lower_backward(const Call& call, const Resolution& resolution, const Convolution& conv) {
  const auto input = resolution.in[conv.operand[kInput]], output = resolution.in[conv.operand[kOutput]];
  const Share share(call, conv, input, output);
  const bool whole = !is_empty(input->local_sizes()) && !is_empty(output->local_sizes());
  if (whole && nothing_differs(conv, share)) return without_unasked(call);
  const auto at = [&](Part part) { return call.operands[conv.operand[part]].argument; };
  const int mask_at = call.argument_index("output_mask");
  return [share, mask_at, gradient = at(kOutput), input = at(kInput), weight = at(kWeight)](LocalCall& local) {
    const auto mask = local.arg(mask_at).toBoolList();
    const bool for_input = mask[0], for_weight = mask[1], for_bias = mask[2];
    auto y = local.arg(gradient).toTensor(), x = local.arg(input).toTensor();
    const auto bias = for_bias ? sum_of_channels(y) : at::Tensor();
    if (share.transposed) {
      y = share.halos.fetch(y, 0);
    } else {
      x = for_weight ? share.halos.fetch(x, 0) : x.new_zeros(share.halos.read_sizes(x.sizes()));
    }
    at::Tensor dx, dw;
    if (is_empty(x.sizes()) || is_empty(y.sizes())) {
      if (for_input) dx = at::zeros_like(x);
      if (for_weight) dw = at::zeros_like(local.arg(weight).toTensor());
    } else if (for_input || for_weight) {
      local.arg(gradient) = y;
      local.arg(input) = x;
      local.arg(mask_at) = c10::List<bool>({for_input, for_weight, false});
      share.set_arguments(local);
      local.call();
      dx = local.arg(0).toTensor();
      dw = local.arg(1).toTensor();
    }
    if (for_input && !share.transposed) dx = share.halos.give_back(dx);
    local.replace({dx, dw, bias});
  };
}

// _slow_conv2d_backward takes the order of one operand's memory for that of all.
Lowering in_one_order(const Call& call, Lowering lowering) {
  std::vector<int> arguments;
  for (const auto& operand : call.operands) arguments.push_back(operand.argument);
  return [arguments, lowering = std::move(lowering)](LocalCall& local) {
    for (const int i : arguments) local.arg(i) = local.arg(i).toTensor().contiguous();
    lowering ? lowering(local) : local.call();
  };
}

// -- The rule ---------------------------------------------------------------------------------------------------------

class ConvolutionRule final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const Convolution conv(call);
    if (!conv.regular) return {};
    Candidates all;
    for (const auto& way : ways(call, mesh_dim, conv)) {
      Candidate candidate{{}, {}, way.bytes};
      for (const auto part : conv.parts) candidate.in.push_back(way.at[part]);
      if (conv.is_backward()) {
        auto& output = candidate.in[conv.operand[kOutput]];
        if (output.is_partial()) output = replicate();
        candidate.out = {gradient_of(way, kInput), gradient_of(way, kWeight), gradient_of(way, kBias)};
      } else {
        candidate.out = {way.at[kOutput]};
      }
      all.push_back(std::move(candidate));
    }
    for (const auto op : conv.is_backward() ? kSums : std::vector<ReduceOp>()) {
      for (const auto part : {kInput, kWeight, kOutput}) add_partial(call, mesh_dim, conv, part, op, all);
    }
    return all;
  }

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    const Convolution conv(call);
    if (!conv.regular) return {};
    const auto& input = *call.operands[conv.operand[kInput]].layout;
    const auto& weight = *call.operands[conv.operand[kWeight]].layout;
    // The transpose's kernels write row-major.
    const bool last = !conv.transposed && call.operands[0].ndim() == 4 && (is_channels_last(input) || is_channels_last(weight));
    const auto& order = is_channels_last(input) ? input : weight;
    const auto meta = [&](Sizes sizes, bool defined = true) {
      auto strides = last ? strides_like(sizes, order) : contiguous_strides(sizes);
      return OutputMeta{std::move(sizes), std::move(strides), input.dtype(), defined};
    };
    if (!conv.is_backward()) return {meta(conv.output_sizes(call))};
    const auto mask = call.arg("output_mask").toBoolList();
    const auto sizes = [](const Layout& layout) { return Sizes(layout.sizes().begin(), layout.sizes().end()); };
    return {meta(sizes(input), mask[0]), meta(sizes(weight), mask[1]), meta({conv.output_sizes(call)[1]}, mask[2])};
  }

  bool describes_outputs() const override { return true; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const Convolution conv(call);
    if (!conv.regular) return {};
    if (!conv.is_backward()) return lower_forward(call, resolution, conv);
    auto gradients = lower_backward(call, resolution, conv);
    return call.has("kernel_size") ? in_one_order(call, std::move(gradients)) : gradients;
  }

 private:
  // Gradients are linear in each operand alone. A gradient does not depend on what it is the gradient of.
  static void add_partial(const Call& call, int64_t mesh_dim, const Convolution& conv, Part part, ReduceOp op, Candidates& all) {
    const int i = conv.operand[part];
    if (i < 0 || !call.operands[i].placements()[mesh_dim].is_partial(op)) return;
    Candidate candidate{Placements(call.operands.size(), replicate()), Placements(call.outputs.size(), partial(op))};
    candidate.in[i] = partial(op);
    if (conv.is_backward() && part != kOutput) {
      candidate.out = Placements(3, replicate());
      candidate.out[part == kInput ? kWeight : kInput] = partial(op);
    }
    all.push_back(std::move(candidate));
  }
};

const Register convolution(
    "aten::convolution aten::convolution_overrideable aten::_convolution aten::mkldnn_convolution aten::_slow_conv2d_forward "
    "aten::slow_conv3d_forward aten::slow_conv_dilated2d aten::slow_conv_dilated3d aten::slow_conv_transpose2d "
    "aten::slow_conv_transpose3d aten::_conv_depthwise2d aten::conv_depthwise3d aten::_nnpack_spatial_convolution "
    "aten::cudnn_convolution aten::cudnn_convolution_transpose",
    std::make_shared<ConvolutionRule>(),
    "samples and output channels are independent, input channels add up, groups stand alone, positions need a halo");
const Register convolution_gradient(
    "aten::convolution_backward aten::convolution_backward_overrideable aten::_slow_conv2d_backward",
    std::make_shared<ConvolutionRule>(),
    "linear in the incoming gradient; gradients of what is whole add up over what is cut");

}  // namespace
}  // namespace dtensor::rules
