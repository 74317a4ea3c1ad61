// The gradients of views that drop elements: zeros of the operand's sizes, with the gradient written to the elements of the view. Any
// reduction of zeros is zero, so pending reductions stay pending.
#include "ops/view_dims.hpp"

#include <algorithm>

namespace dtensor::rules {

namespace {

using Maps = std::vector<DimMap>;

int64_t whole_ndim(const Call& call) { return static_cast<int64_t>(call.outputs[0].sizes.size()); }

// From the gradient's dims to the operand's: the reverse of dropping `dropped` of `ndim` dims and appending others.
DimMap undo_dropping(int64_t grad_ndim, int64_t ndim, c10::ArrayRef<int64_t> dropped) {
  DimMap map(grad_ndim);
  const auto forward = without_dims(ndim, dropped);
  for (int64_t d = 0; d < ndim; ++d) {
    if (forward[d].dim >= 0) map[forward[d].dim].dim = d;
  }
  return map;
}

// A gradient of length one is written to all of a longer dim: that is not cut.
Maps without_broadcast(const Call& call, DimMap map) {
  for (size_t d = 0; d < map.size(); ++d) {
    auto& image = map[d];
    const auto length = image.dim < 0 ? 1 : image.slices() ? image.end - image.begin : call.outputs[0].sizes[image.dim];
    if (length != 1 && call.operands[0].sizes()[d] == 1) image = {};
  }
  return {std::move(map)};
}

Maps select_backward(const Call& call) {
  const auto ndim = whole_ndim(call);
  return without_broadcast(call, undo_dropping(call.operands[0].ndim(), ndim, {wrap_dim(call.int_arg("dim"), ndim)}));
}

Maps diagonal_backward(const Call& call) {
  const auto ndim = whole_ndim(call);
  return without_broadcast(call, undo_dropping(call.operands[0].ndim(), ndim,
                                               {wrap_dim(call.int_arg("dim1"), ndim), wrap_dim(call.int_arg("dim2"), ndim)}));
}

Maps unfold_backward(const Call& call) {
  const auto ndim = whole_ndim(call);
  auto map = same_dims(call.operands[0].ndim());
  map.back().dim = -1;  // the windows' inside
  if (ndim > 0) map[wrap_dim(call.int_arg("dim"), ndim)].dim = -1;
  return {map};
}

int64_t bound(int64_t index, int64_t length) { return std::clamp<int64_t>(index < 0 ? index + length : index, 0, length); }

Maps slice_backward(const Call& call) {
  const auto ndim = whole_ndim(call);
  const auto dim = wrap_dim(call.int_arg("dim"), ndim);
  const auto length = call.outputs[0].sizes[dim];
  auto map = same_dims(ndim);
  const auto begin = bound(call.int_arg("start"), length);
  map[dim] = {dim, length, begin, std::max(begin, bound(call.int_arg("end"), length)), true};
  if (call.int_arg("step") != 1) map[dim].dim = -1;
  return without_broadcast(call, std::move(map));
}

std::vector<Sizes> input_sizes(const Call& call) {
  const auto sizes = call.ints_arg("input_sizes");
  return {Sizes(sizes.begin(), sizes.end())};
}

Changes local_input_sizes(const Call& call, const Resolution& resolution) {
  const auto sizes = local_output_sizes(call, resolution, 0);
  if (sizes == call.outputs[0].sizes) return {};
  return {{call.argument_index("input_sizes"), std::vector<int64_t>(sizes.begin(), sizes.end())}};
}

Lowering with_local_sizes(const Call& call, const Resolution& resolution) {
  auto changes = local_input_sizes(call, resolution);
  return changes.empty() ? Lowering() : with_arguments(std::move(changes));
}

Lowering slice_locally(const Call& call, const Resolution& resolution) {
  auto changes = local_input_sizes(call, resolution);
  if (changes.empty()) return {};
  const auto dim = wrap_dim(call.int_arg("dim"), whole_ndim(call));
  const auto image = slice_backward(call)[0][dim];
  const auto local = local_output_sizes(call, resolution, 0)[dim];
  if (image.slices() && local != image.whole) {
    changes.emplace_back(call.argument_index("start"), image.begin * local / image.whole);
    changes.emplace_back(call.argument_index("end"), image.end * local / image.whole);
  }
  return with_arguments(std::move(changes));
}

RulePtr rule(DimRule::Maps maps, DimRule::Lower lower = with_local_sizes, Passes passes = Passes::all) {
  return std::make_shared<DimRule>(maps, lower, passes, input_sizes);
}

const Register selected("aten::select_backward", rule(select_backward), "the other dims keep their cuts");
const Register on_diagonal("aten::diagonal_backward", rule(diagonal_backward), "dims off the diagonal keep their cuts");
const Register unfolded("aten::unfold_backward", rule(unfold_backward, with_local_sizes, Passes::sums),
                        "windows overlap along one dim, and add up there; the others keep their cuts");
const Register slicing("aten::slice_backward", rule(slice_backward, slice_locally),
                      "a slice of whole blocks keeps their cut; the other dims keep theirs");

}  // namespace

}  // namespace dtensor::rules
