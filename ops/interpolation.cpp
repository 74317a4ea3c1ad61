// Resampling of planes. Samples and channels may be sharded; positions are whole.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

// [samples, channels, positions...]
Dims planes(c10::IntArrayRef sizes) {
  auto dims = lettered(sizes);
  for (size_t d = 2; d < dims.size(); ++d) dims[d].letter = kWhole;
  return dims;
}

// The gradient has the sizes of the input, the result those of the output, where the call says so.
Structure upsample(const Call& call) {
  const auto dims = planes(call.operands[0].sizes());
  auto result = dims;
  const bool gradient = call.has("input_size");
  const auto sizes = call.has("output_size") || gradient ? call.ints_arg(gradient ? "input_size" : "output_size") : std::vector<int64_t>();
  for (size_t i = 0; i < sizes.size() && i < result.size(); ++i) result[result.size() - 1 - i].size = sizes[sizes.size() - 1 - i];
  return {{dims}, {result}, {}, {kSums, {{0}}}};
}

Structure nearest(const Call& call) {
  auto structure = upsample(call);
  structure.keeps = {kAnyPartial, {{0}}};
  return structure;
}

// The gradient is told the input's sizes, samples and channels among them.
Lowering local_input_size(const Call& call, const Resolution& resolution) {
  const int position = call.argument_index("input_size");
  if (position < 0) return zeros_of_nothing(call, resolution);
  auto sizes = call.ints_arg("input_size");
  const auto local = resolution.in[0]->local_sizes();
  if (sizes.size() < 2 || local.size() < 2) return {};
  sizes[0] = local[0];
  sizes[1] = local[1];
  return zeros_of_nothing(call, resolution, [position, sizes](LocalCall& local_call) {
    local_call.arg(position) = sizes;
    local_call.call();
  });
}

// -- Sampling at given places -----------------------------------------------------------------------------------------

// The input is [samples, channels, positions...], the grid [samples, places..., coordinates], the output
// [samples, channels, places...].
struct Grid {
  explicit Grid(const Call& call) {
    const auto& from = call.operand(call.argument_index("input"))->sizes();
    const auto& at = call.operand(call.argument_index("grid"))->sizes();
    input = planes(from);
    output = planes(from.slice(0, 2));
    grid = {input[0]};
    for (size_t d = 1; d + 1 < at.size(); ++d) {
      grid.push_back({static_cast<int>(d + 1), at[d]});
      output.push_back(grid.back());
    }
    grid.push_back({kWhole, at.back()});
  }
  Dims input, grid, output;
};

bool makes_sense(const Call& call) {
  const auto input = call.operand(call.argument_index("input"))->ndim(), grid = call.operand(call.argument_index("grid"))->ndim();
  return input == grid && input >= 3;
}

Structure sample(const Call& call) {
  if (!makes_sense(call)) return senseless(call);
  Grid grid(call);
  return {{grid.input, grid.grid}, {grid.output}, {}, {kSums, {{0}}}};
}

Structure sample_backward(const Call& call) {
  if (!makes_sense(call)) return senseless(call);
  Grid grid(call);
  Structure structure{{grid.output, grid.input, grid.grid}, {grid.input, grid.grid}, Placements(2, partial()), {kSums, {{0}}}};
  if (!call.arg("output_mask").toBoolList()[0]) structure.undefined = {0};
  return structure;
}

Lowering samples(const Call& call, const Resolution& resolution) { return zeros_of_nothing(call, resolution); }

// -- The table --------------------------------------------------------------------------------------------------------

const Register repeated(
    "aten::upsample_nearest1d aten::upsample_nearest2d aten::upsample_nearest3d aten::_upsample_nearest_exact1d "
    "aten::_upsample_nearest_exact2d aten::_upsample_nearest_exact3d",
    family(nearest, local_input_size), "data movement along positions; samples and channels are free");
const Register interpolated(
    "aten::upsample_linear1d aten::upsample_bilinear2d aten::upsample_bicubic2d aten::upsample_trilinear3d "
    "aten::_upsample_bilinear2d_aa aten::_upsample_bicubic2d_aa "
    "aten::upsample_nearest1d_backward aten::upsample_nearest2d_backward aten::upsample_nearest3d_backward "
    "aten::_upsample_nearest_exact1d_backward aten::_upsample_nearest_exact2d_backward aten::_upsample_nearest_exact3d_backward "
    "aten::upsample_linear1d_backward aten::upsample_bilinear2d_backward aten::upsample_bicubic2d_backward "
    "aten::upsample_trilinear3d_backward aten::_upsample_bilinear2d_aa_backward aten::_upsample_bicubic2d_aa_backward",
    family(upsample, local_input_size), "linear; an output may weigh inputs of any position, samples and channels are free");
const Register sampled("aten::grid_sampler_2d aten::grid_sampler_3d aten::_grid_sampler_2d_cpu_fallback",
                       family(sample, samples), "linear in the input; a place may read any position");
const Register sampled_gradient("aten::grid_sampler_2d_backward aten::grid_sampler_3d_backward", family(sample_backward, samples),
                                "linear in the incoming gradient; the input's gradient sums over places, the grid's over channels");

}  // namespace
}  // namespace dtensor::rules
