// Pooling. Samples and channels may be sharded; positions too, with a halo, if windows have a fixed size.
#include "ops/halo.hpp"

#include "ops/family.hpp"

#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace dtensor::rules {
namespace {

int64_t positions_of(const Call& call) { return call.schema.name().find("3d") == std::string::npos ? 2 : 3; }

bool is_backward(const Call& call) { return call.has("grad_output"); }

const Operand& self_of(const Call& call) { return *call.operand(call.argument_index("self")); }

std::vector<int64_t> ints(const Call& call, std::string_view name, int64_t otherwise) {
  auto values = call.has(name) ? call.ints_arg(name) : std::vector<int64_t>{otherwise};
  if (!values.empty()) values.resize(positions_of(call), values[0]);
  return values;
}

const std::string& name_of(const Call& call, const Operand& operand) { return call.schema.arguments()[operand.argument].name(); }

// -- Samples and channels ---------------------------------------------------------------------------------------------

Dims with_positions(const Dims& like, const std::vector<int64_t>& lengths) {
  Dims dims(like.begin(), like.end() - static_cast<int64_t>(lengths.size()));
  for (const auto length : lengths) dims.push_back({kWhole, length});
  return dims;
}

// All tensors of a call have the same leading dims, and whole positions.
Structure planes(const Call& call, const std::vector<int64_t>& output_positions, KeepsPartial keeps) {
  const auto positions = positions_of(call);
  const auto ndim = self_of(call).ndim();
  for (const auto& operand : call.operands) {
    if (operand.ndim() <= positions && name_of(call, operand) != "random_samples") return senseless(call);
  }
  const auto dims = [&](c10::IntArrayRef sizes) {
    auto all = lettered(sizes);
    for (int64_t d = ndim - positions; d < static_cast<int64_t>(all.size()); ++d) all[d].letter = kWhole;
    return all;
  };
  Structure structure;
  for (const auto& operand : call.operands) structure.in.push_back(dims(operand.sizes()));
  const auto self = dims(self_of(call).sizes());
  structure.out.assign(call.schema.returns().size(), is_backward(call) ? self : with_positions(self, output_positions));
  if (at::isFloatingType(self_of(call).layout->dtype())) structure.keeps = std::move(keeps);  // whole numbers are divided with a rest
  if (is_backward(call)) structure.shapes = {call.operand_index(call.argument_index("self"))};
  return structure;
}

// The output's positions are an argument.
Structure whole_planes(const Call& call, KeepsPartial keeps) {
  return planes(call, call.has("output_size") ? ints(call, "output_size", 0) : std::vector<int64_t>(), std::move(keeps));
}

Structure adaptive_average(const Call& call) {
  auto structure = whole_planes(call, {kSums, {{0}}});
  if (structure.out.empty()) return structure;
  // Only the kernels of two dims know other memory orders.
  Sizes sizes;
  for (const auto& dim : structure.out[0]) sizes.push_back(dim.size);
  structure.strides = {positions_of(call) == 2 ? strides_like(sizes, *self_of(call).layout) : contiguous_strides(sizes)};
  return structure;
}

Structure adaptive_max(const Call& call) { return whole_planes(call, {}); }
Structure plane_gradient(const Call& call) { return whole_planes(call, {kSums, {{0}}}); }

// Places of values are positions in the whole output; there, zero is zero on every rank.
Structure unpool(const Call& call) {
  auto structure = adaptive_average(call);
  structure.keeps = {kAnyPartial, {{0}}};
  return structure;
}

// The windows' places follow from samples: [samples, channels, positions], with one sample for an input without samples.
Structure fractional(const Call& call) {
  auto structure = whole_planes(call, {});
  const auto& self = self_of(call);
  if (self.ndim() <= positions_of(call)) return structure;
  auto& random = structure.in[call.operand_index(call.argument_index("random_samples"))];
  const auto leading = self.ndim() - positions_of(call);
  random = without_letters(call.operand(call.argument_index("random_samples"))->sizes());
  if (random.size() != 3) return structure;
  for (int64_t d = 0; d < leading; ++d) random[2 - leading + d].letter = static_cast<int>(d);
  return structure;
}

Lowering local(const Call& call, const Resolution& resolution) { return zeros_of_nothing(call, resolution); }

// -- Windows ----------------------------------------------------------------------------------------------------------

std::vector<Window> windows_of(const Call& call) {
  const auto kernel = ints(call, "kernel_size", 1), padding = ints(call, "padding", 0), dilation = ints(call, "dilation", 1);
  auto stride = ints(call, "stride", 1);
  if (stride.empty()) stride = kernel;
  std::vector<Window> windows;
  for (int64_t i = 0; i < positions_of(call); ++i) windows.push_back({kernel[i], stride[i], padding[i], dilation[i]});
  return windows;
}

// The last window may reach past the end when sizes are rounded up, but starts inside of the input or its left padding.
int64_t count_of(const Window& w, int64_t length, bool round_up) {
  if (w.stride < 1) return 0;
  const auto room = length + 2 * w.padding - w.dilation * (w.kernel - 1) - 1 + (round_up ? w.stride - 1 : 0);
  if (room < 0) return 0;
  const auto count = room / w.stride + 1;
  return round_up && (count - 1) * w.stride >= length + w.padding ? count - 1 : count;
}

std::vector<int64_t> counts_of(const Call& call, const std::vector<Window>& windows) {
  const auto sizes = self_of(call).sizes();
  std::vector<int64_t> counts;
  if (sizes.size() < windows.size()) return counts;
  for (size_t i = 0; i < windows.size(); ++i) {
    counts.push_back(count_of(windows[i], sizes[sizes.size() - windows.size() + i], call.bool_arg("ceil_mode")));
  }
  return counts;
}

// What is different on a rank whose positions are cut.
struct Cut {
  std::vector<Window> windows;
  int64_t first;                 // the dim of the first position
  Halos halos;
  std::vector<int64_t> padding;  // none where there is a halo
  std::vector<int64_t> lengths;  // of all positions
  Intervals outputs;             // this rank's, of each position
  int self, padding_at, divisor_at, indices;

  Cut(const Call& call, const LayoutPtr& input, const LayoutPtr& output)
      : windows(windows_of(call)),
        first(input->ndim() - positions_of(call)),
        halos(input, output, first, windows),
        self(call.argument_index("self")),
        padding_at(call.argument_index("padding")),
        divisor_at(call.argument_index("divisor_override")),
        indices(call.argument_index("indices")) {
    for (size_t i = 0; i < windows.size(); ++i) {
      const auto dim = first + static_cast<int64_t>(i);
      const auto held = output->intervals(dim, call.mesh.coordinate());
      padding.push_back(windows[i].padding);
      lengths.push_back(input->sizes()[dim]);
      outputs.push_back(held.empty() ? Interval() : held[0]);
    }
    for (const auto& halo : halos) padding[halo.dim() - first] = 0;
  }

  // What of each position is read: all of it where it is not cut.
  Intervals reads() const {
    Intervals all;
    for (const auto length : lengths) all.push_back({0, length});
    for (const auto& halo : halos) all[halo.dim() - first] = halo.read();
    return all;
  }
};

// -- Averages: sums of windows, divided by what one device divides by -----------------------------------------------

// How many elements each of the outputs [begin, end) averages over, along one position.
std::vector<int64_t> averaged(const Window& w, const Interval& outputs, int64_t length, bool with_padding) {
  std::vector<int64_t> counts;
  for (auto o = outputs.begin; o < outputs.end; ++o) {
    const auto begin = o * w.stride - w.padding, end = std::min(begin + w.kernel, length + w.padding);
    counts.push_back(with_padding ? end - begin : std::min(end, length) - std::max<int64_t>(begin, 0));
  }
  return counts;
}

// [windows, windows, ...]
at::Tensor divisor(const Cut& cut, bool with_padding, const at::TensorOptions& options) {
  auto product = at::ones({}, options);
  for (size_t i = 0; i < cut.windows.size(); ++i) {
    const auto counts = averaged(cut.windows[i], cut.outputs[i], cut.lengths[i], with_padding);
    product = product.unsqueeze(-1).mul(at::tensor(counts, options.dtype(at::kLong)).to(options));
  }
  return product;
}

Lowering average(const Call& call, const Resolution& resolution) {
  const auto output = is_backward(call) ? resolution.in[0] : output_layout(call, resolution, 0);
  const auto& input = resolution.in[call.operand_index(call.argument_index("self"))];
  const Cut cut(call, input, output);
  if (cut.halos.empty()) return zeros_of_nothing(call, resolution);
  const bool divides = call.arg("divisor_override").isNone(), with_padding = call.bool_arg("count_include_pad");
  const auto divided = [cut, divides, with_padding](const at::Tensor& t) {
    return divides ? t.div(divisor(cut, with_padding, t.options())) : t;
  };
  if (is_backward(call)) {
    return [cut, divides, divided](LocalCall& local) {
      const auto gradient = local.arg(0).toTensor(), self = local.arg(cut.self).toTensor();
      const auto read = self.new_zeros(cut.halos.read_sizes(self.sizes()));
      if (is_empty(gradient.sizes()) || is_empty(read.sizes())) return local.replace({cut.halos.give_back(read)});
      local.arg(0) = divided(gradient);
      local.arg(cut.self) = read;
      local.arg(cut.padding_at) = cut.padding;
      if (divides) local.arg(cut.divisor_at) = 1;
      local.call();
      local.replace({cut.halos.give_back(local.arg(0).toTensor())});
    };
  }
  return [cut, divides, divided, sizes = output->local_sizes().vec()](LocalCall& local) {
    const auto read = cut.halos.fetch(local.arg(cut.self).toTensor(), 0);
    if (is_empty(sizes)) return local.replace({read.new_zeros(sizes)});
    local.arg(cut.self) = widened(read);  // a window's sum may be more than half precision holds
    local.arg(cut.padding_at) = cut.padding;
    if (divides) local.arg(cut.divisor_at) = 1;
    local.call();
    local.replace({divided(local.arg(0).toTensor()).to(read.scalar_type())});
  };
}

// -- Maxima: their places are counted in the whole plane --------------------------------------------------------------

// Places in a plane of `lengths` as one index per position, and back.
std::vector<at::Tensor> coordinates(at::Tensor places, const std::vector<int64_t>& lengths) {
  std::vector<at::Tensor> all(lengths.size());
  for (auto i = lengths.size(); i-- > 0;) {
    all[i] = places.remainder(lengths[i]);
    places = places.div(lengths[i], "floor");
  }
  return all;
}
at::Tensor places(const std::vector<at::Tensor>& coordinates, const std::vector<int64_t>& lengths) {
  auto result = coordinates[0];
  for (size_t i = 1; i < lengths.size(); ++i) result = result.mul(lengths[i]).add(coordinates[i]);
  return result;
}

std::vector<int64_t> lengths_of(const Intervals& intervals) {
  std::vector<int64_t> lengths;
  for (const auto& interval : intervals) lengths.push_back(interval.length());
  return lengths;
}

// From the plane that was read to the whole one. Where all values are -inf the kernel names the first of a window, which may lie
// in the padding here; one device names the first that does not.
at::Tensor in_whole_plane(const Cut& cut, const at::Tensor& local) {
  const auto reads = cut.reads();
  auto all = coordinates(local, lengths_of(reads));
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = all[i].add(reads[i].begin);
    const auto step = cut.windows[i].dilation;
    all[i] = all[i].add(all[i].neg().clamp_min(0).add(step - 1).div(step, "floor").mul(step));
  }
  return places(all, cut.lengths);
}

at::Tensor in_read_plane(const Cut& cut, const at::Tensor& global) {
  const auto reads = cut.reads();
  auto all = coordinates(global, cut.lengths);
  for (size_t i = 0; i < all.size(); ++i) all[i] = all[i].sub(reads[i].begin);
  return places(all, lengths_of(reads));
}

Lowering maximum(const Call& call, const Resolution& resolution) {
  const auto output = output_layout(call, resolution, 0);
  const Cut cut(call, resolution.in[0], output);
  if (cut.halos.empty()) return zeros_of_nothing(call, resolution);
  return [cut, sizes = output->local_sizes().vec()](LocalCall& local) {
    const auto read = cut.halos.fetch(local.arg(0).toTensor(), -std::numeric_limits<double>::infinity());
    if (is_empty(sizes)) return local.replace({read.new_zeros(sizes), at::zeros(sizes, read.options().dtype(at::kLong))});
    local.arg(cut.self) = read;
    local.arg(cut.padding_at) = cut.padding;
    local.call();
    local.arg(1) = in_whole_plane(cut, local.arg(1).toTensor());
  };
}

Lowering maximum_gradient(const Call& call, const Resolution& resolution) {
  const Cut cut(call, resolution.in[call.operand_index(call.argument_index("self"))], resolution.in[0]);
  if (cut.halos.empty()) return zeros_of_nothing(call, resolution);
  return [cut](LocalCall& local) {
    const auto gradient = local.arg(0).toTensor(), indices = local.arg(cut.indices).toTensor();
    const auto read = gradient.new_zeros(cut.halos.read_sizes(local.arg(cut.self).toTensor().sizes()));
    if (!is_empty(gradient.sizes())) {
      const auto at = in_read_plane(cut, indices).flatten(cut.first);
      read.flatten(cut.first).scatter_add_(cut.first, at, gradient.flatten(cut.first));
    }
    local.replace({cut.halos.give_back(read)});
  };
}

// Windows: the cuts of whole planes, and cuts of positions.
class Pooling final : public Rule {
 public:
  Pooling(KeepsPartial keeps, LoweringOf lower) : lower_(std::move(lower)) {
    planes_ = family([keeps = std::move(keeps)](const Call& call) { return planes(call, counts_of(call, windows_of(call)), keeps); },
                     lower_);
  }

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto all = planes_->candidates(call, mesh_dim);
    const auto& self = self_of(call);
    const auto positions = positions_of(call);
    if (!c10::isFloatingType(self.layout->dtype()) || self.ndim() <= positions) return all;
    const auto windows = windows_of(call);
    const auto counts = counts_of(call, windows);
    for (int64_t i = 0; i < positions; ++i) {
      const auto dim = self.ndim() - positions + i;
      all.push_back({Placements(call.operands.size(), shard(dim)), Placements(call.schema.returns().size(), shard(dim)),
                     halo_bytes(call, mesh_dim, self, self.sizes(), counts[i], dim, windows[i])});
    }
    return all;
  }

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    auto metas = planes_->output_metas(call);
    if (metas.size() == 2) metas[1].dtype = at::kLong;
    return metas;
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override { return planes_->lower(call, resolution); }

 private:
  LoweringOf lower_;
  RulePtr planes_;
};

RulePtr pooling(KeepsPartial keeps, LoweringOf lower) { return std::make_shared<Pooling>(std::move(keeps), std::move(lower)); }

// -- The table --------------------------------------------------------------------------------------------------------

const KeepsPartial kLinear{kSums, {{0}}};

const Register averages("aten::avg_pool2d aten::avg_pool3d aten::avg_pool2d_backward aten::avg_pool3d_backward",
                        pooling(kLinear, average), "linear; samples and channels are free, positions need a halo");
const Register maxima("aten::max_pool2d_with_indices aten::max_pool3d_with_indices", pooling({}, maximum),
                      "samples and channels are free, positions need a halo");
const Register maxima_gradient("aten::max_pool2d_with_indices_backward aten::max_pool3d_with_indices_backward",
                               pooling(kLinear, maximum_gradient),
                               "linear in the incoming gradient; samples and channels are free, positions give a halo back");
const Register adaptive_averages(
    "aten::_adaptive_avg_pool2d aten::_adaptive_avg_pool3d aten::_adaptive_avg_pool2d_backward aten::_adaptive_avg_pool3d_backward",
    family(adaptive_average, local), "linear; windows divide the whole plane; samples and channels are free");
const Register adaptive_maxima("aten::adaptive_max_pool2d aten::adaptive_max_pool3d", family(adaptive_max, local),
                               "windows divide the whole plane; samples and channels are free");
const Register plane_gradients(
    "aten::adaptive_max_pool2d_backward aten::adaptive_max_pool3d_backward aten::fractional_max_pool2d_backward "
    "aten::fractional_max_pool3d_backward",
    family(plane_gradient, local), "linear in the incoming gradient; samples and channels are free");
const Register fractional_maxima("aten::fractional_max_pool2d aten::fractional_max_pool3d", family(fractional, local),
                                 "windows lie at random in the whole plane; samples and channels are free");
const Register unpooled("aten::max_unpool2d aten::max_unpool3d", family(unpool, local),
                        "data movement within whole planes; samples and channels are free");

}  // namespace
}  // namespace dtensor::rules
