// Padding. Dims that are padded are whole; others may be sharded.
#include "ops/family.hpp"

#include <dtensor/base/compat.hpp>

#include <range/v3/view/zip.hpp>

namespace dtensor::rules {
namespace {

// The pads before and after each dim; the argument lists them from the last dim on.
struct Pads {
  explicit Pads(const Call& call, const Operand& input) : before(input.ndim(), 0), after(input.ndim(), 0) {
    const auto pads = call.ints_arg(call.has("pad") ? "pad" : "padding");
    for (size_t i = 0; i + 1 < pads.size() && i / 2 < static_cast<size_t>(input.ndim()); i += 2) {
      before[input.ndim() - 1 - i / 2] = pads[i];
      after[input.ndim() - 1 - i / 2] = pads[i + 1];
    }
  }

  Dims of_input(const Operand& input) const {
    auto dims = lettered(input.sizes());
    for (auto&& [dim, first, last] : ranges::views::zip(dims, before, after)) {
      if (first != 0 || last != 0) dim.letter = kWhole;
    }
    return dims;
  }
  Dims of_output(const Operand& input) const {
    auto dims = of_input(input);
    for (auto&& [dim, first, last] : ranges::views::zip(dims, before, after)) dim.size += first + last;
    return dims;
  }

  std::vector<int64_t> before, after;
};

// A pending value's padding is what the reduction makes of equal paddings.
std::vector<ReduceOp> kept(const Call& call) {
  if (!call.has("value")) return kAnyPartial;
  const auto value = call.arg("value").toScalar();
  if (value.isFloatingPoint() ? value.toDouble() == 0 : value.isIntegral(true) && value.toLong() == 0) return kAnyPartial;
  return {ReduceOp::avg, ReduceOp::min, ReduceOp::max};
}

Structure forward(const Call& call) {
  const auto& input = call.operands[0];
  const Pads pads(call, input);
  return {{pads.of_input(input)}, {pads.of_output(input)}, {}, {kept(call), {{0}}}};
}

// Since libtorch 2.1 planes keep their memory order.
Structure in_order(Structure structure, const Layout& input) {
  Sizes sizes;
  for (const auto& dim : structure.out[0]) sizes.push_back(dim.size);
  structure.strides = {DTENSOR_TORCH_AT_LEAST(2, 1) ? strides_like(sizes, input) : contiguous_strides(sizes)};
  return structure;
}

Structure mirror(const Call& call) { return in_order(forward(call), *call.operands[0].layout); }

Structure backward(const Call& call) {
  const auto& input = call.operands[1];
  const Pads pads(call, input);
  Structure structure{{pads.of_output(input), pads.of_input(input)}, {pads.of_input(input)}, {}, {kSums, {{0}}}};
  structure.shapes = {1};
  return in_order(std::move(structure), *input.layout);
}

// Nothing in a padded dim becomes padding; nothing in another one stays nothing, which the kernel refuses.
Lowering constants(const Call& call, const Resolution& resolution) {
  const bool nothing = is_empty(output_layout(call, resolution, 0)->local_sizes());
  return nothing ? zeros_of_nothing(call, resolution) : Lowering();
}

Lowering copies(const Call& call, const Resolution& resolution) { return zeros_of_nothing(call, resolution); }

const Register constant("aten::constant_pad_nd", family(forward, constants), "dims without padding are free");
const Register mirrored(
    "aten::reflection_pad1d aten::reflection_pad2d aten::reflection_pad3d aten::replication_pad1d aten::replication_pad2d "
    "aten::replication_pad3d",
    family(mirror, copies, Outputs::of_structure), "data movement along padded dims; others are free");
const Register mirrored_gradient(
    "aten::reflection_pad1d_backward aten::reflection_pad2d_backward aten::reflection_pad3d_backward "
    "aten::replication_pad1d_backward aten::replication_pad2d_backward aten::replication_pad3d_backward",
    family(backward, copies, Outputs::of_structure), "linear in the incoming gradient; dims without padding are free");

}  // namespace
}  // namespace dtensor::rules
