// Regrouping of planes: pixels to channels and back, windows to columns and back, shuffled channels.
#include "ops/family.hpp"

#include <algorithm>

namespace dtensor::rules {
namespace {

// The last three dims of one tensor have r * r channels for each of the other's, whose planes are r times as high and wide.
struct Pixels {
  Pixels(c10::IntArrayRef packed_sizes, int64_t r) : packed(lettered(packed_sizes)), plane(packed) {
    const auto ndim = packed.size();
    packed[ndim - 3].block = r * r;
    plane[ndim - 3].size /= r * r;
    for (const auto d : {ndim - 2, ndim - 1}) {
      plane[d].size *= r;
      plane[d].block = r;
    }
  }
  Dims packed, plane;
};

Sizes sizes_of(const Dims& dims) {
  Sizes sizes;
  for (const auto& dim : dims) sizes.push_back(dim.size);
  return sizes;
}

Structure moved(Dims in, Dims out, const Layout& input) {
  Structure structure{{std::move(in)}, {std::move(out)}, {}, {kAnyPartial, {{0}}}};
  structure.strides = {strides_like(sizes_of(structure.out[0]), input)};
  return structure;
}

Structure pixel_shuffle(const Call& call) {
  const auto r = call.int_arg("upscale_factor");
  if (r < 1 || call.operands[0].ndim() < 3) return senseless(call);
  Pixels pixels(call.operands[0].sizes(), r);
  return moved(pixels.packed, pixels.plane, *call.operands[0].layout);
}

Structure pixel_unshuffle(const Call& call) {
  const auto r = call.int_arg("downscale_factor");
  const auto sizes = call.operands[0].sizes();
  if (r < 1 || sizes.size() < 3 || is_empty(sizes)) return senseless(call);  // the kernel returns what is empty as it is
  Sizes packed(sizes.begin(), sizes.end());
  packed[packed.size() - 3] *= r * r;
  packed[packed.size() - 2] /= r;
  packed[packed.size() - 1] /= r;
  Pixels pixels(packed, r);
  return moved(pixels.plane, pixels.packed, *call.operands[0].layout);
}

Structure channel_shuffle(const Call& call) {
  auto dims = lettered(call.operands[0].sizes());
  if (dims.size() > 1) dims[1].letter = kWhole;
  return moved(dims, dims, *call.operands[0].layout);
}

// -- Columns: [samples, channels, height, width] <-> [samples, channels * kernel, windows] ----------------------------

bool makes_sense(const Call& call, int64_t ndim_without_samples) {
  const auto ndim = call.operands[0].ndim();
  if (ndim != ndim_without_samples && ndim != ndim_without_samples + 1) return false;
  for (const auto name : {"kernel_size", "stride", "padding", "dilation"}) {
    const auto values = call.ints_arg(name);
    const int64_t lowest = std::string_view(name) == "padding" ? 0 : 1;
    if (values.empty() || values.size() > 2 || *std::ranges::min_element(values) < lowest) return false;
  }
  return !call.has("output_size") || call.ints_arg("output_size").size() == 2;
}

struct Columns {
  Columns(const Call& call, int64_t samples, c10::IntArrayRef plane_sizes) {
    const auto kernel = call.ints_arg("kernel_size"), stride = call.ints_arg("stride"), padding = call.ints_arg("padding"),
               dilation = call.ints_arg("dilation");
    const auto at = [](const std::vector<int64_t>& values, size_t i) { return values[values.size() == 1 ? 0 : i]; };
    planes = lettered(plane_sizes);
    columns = Dims(planes.begin(), planes.begin() + samples + 1);
    int64_t windows = 1;
    for (size_t i = 0; i < 2; ++i) {
      auto& position = planes[samples + 1 + i];
      position.letter = kWhole;
      windows *= (position.size + 2 * at(padding, i) - at(dilation, i) * (at(kernel, i) - 1) - 1) / at(stride, i) + 1;
      columns[samples].block *= at(kernel, i);
    }
    columns[samples].size *= columns[samples].block;
    columns.push_back({kWhole, windows});
  }
  Dims planes, columns;
};

Structure im2col(const Call& call) {
  if (!makes_sense(call, 3)) return senseless(call);
  const auto sizes = call.operands[0].sizes();
  const Columns dims(call, static_cast<int64_t>(sizes.size()) - 3, sizes);
  return {{dims.planes}, {dims.columns}, {}, {kAnyPartial, {{0}}}};
}

Structure col2im(const Call& call) {
  if (!makes_sense(call, 2)) return senseless(call);
  const auto sizes = call.operands[0].sizes();
  const auto samples = static_cast<int64_t>(sizes.size()) - 2;
  Sizes plane(sizes.begin(), sizes.end() - 1);
  for (const auto k : call.ints_arg("kernel_size")) plane[samples] /= call.ints_arg("kernel_size").size() == 1 ? k * k : k;
  for (const auto length : call.ints_arg("output_size")) plane.push_back(length);
  const Columns dims(call, samples, plane);
  return {{dims.columns}, {dims.planes}, {}, {kSums, {{0}}}};
}

Lowering local(const Call& call, const Resolution& resolution) { return zeros_of_nothing(call, resolution); }

const Register to_pixels("aten::pixel_shuffle", family(pixel_shuffle, local, Outputs::of_structure),
                         "data movement; whole blocks of channels, or rows, stay together");
const Register to_channels("aten::pixel_unshuffle", family(pixel_unshuffle, local, Outputs::of_structure),
                           "data movement; whole blocks of rows, or of channels, stay together");
const Register shuffled("aten::channel_shuffle aten::native_channel_shuffle", family(channel_shuffle, local, Outputs::of_structure),
                        "data movement along channels; other dims are free");
const Register to_columns("aten::im2col", family(im2col, local, Outputs::of_structure), "data movement; samples and channels are free");
const Register from_columns("aten::col2im", family(col2im, local, Outputs::of_structure),
                            "sums along positions; samples and channels are free");

}  // namespace
}  // namespace dtensor::rules
