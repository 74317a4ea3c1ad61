// Views that map dims to dims: permuting, selecting, slicing, expanding, and views that change nothing.
#include "ops/view_dims.hpp"
#include "ops/view_strided.hpp"

#include <dtensor/base/error.hpp>

#include <dtensor/mesh/alias.hpp>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/split_with_sizes.h>

#include <limits>
#include <numeric>

namespace dtensor::rules {

namespace {

using Maps = std::vector<DimMap>;

c10::IntArrayRef sizes_of(const Call& call) { return call.operands[0].sizes(); }
int64_t ndim_of(const Call& call) { return call.operands[0].ndim(); }
int64_t dim_arg(const Call& call, std::string_view name = "dim") { return wrap_dim(call.int_arg(name), ndim_of(call)); }

RulePtr rule(DimRule::Maps maps, DimRule::Lower lower = nullptr, Passes passes = Passes::all) {
  return std::make_shared<DimRule>(maps, lower, passes);
}

// -- Nothing changes ---------------------------------------------------------------------------------------------------------

Maps identity(const Call& call) { return {same_dims(ndim_of(call))}; }

const Register same("aten::alias aten::detach aten::lift aten::lift_fresh aten::alias_copy aten::detach_copy aten::lift_fresh_copy",
                    rule(identity), "nothing changes");

// A lazy conjugation or negation would hide in the local tensor's memory from the collectives, so it is done at once.
Lowering resolve_lazy(const Call&, const Resolution&) {
  return [](LocalCall& call) {
    call.call();
    call.arg(0) = call.arg(0).toTensor().resolve_conj().resolve_neg();
  };
}

constexpr auto kWhyAdditive = "elementwise and additive";
const Register conjugate("aten::_conj aten::_neg_view", rule(identity, resolve_lazy, Passes::sums), kWhyAdditive);
const Register conjugate_copy("aten::_conj_copy aten::_neg_view_copy", rule(identity, nullptr, Passes::sums), kWhyAdditive);

// -- Order of dims -----------------------------------------------------------------------------------------------------------

Maps permute(const Call& call) {
  const auto order = call.ints_arg("dims");
  auto map = same_dims(ndim_of(call));
  for (size_t o = 0; o < order.size(); ++o) map[wrap_dim(order[o], ndim_of(call))].dim = static_cast<int64_t>(o);
  return {map};
}

Maps transpose(const Call& call) {
  auto map = same_dims(ndim_of(call));
  if (!map.empty()) std::swap(map[dim_arg(call, "dim0")], map[dim_arg(call, "dim1")]);
  return {map};
}

Maps t(const Call& call) {
  auto map = same_dims(ndim_of(call));
  if (map.size() == 2) std::swap(map[0], map[1]);
  return {map};
}

const Register permuted("aten::permute aten::permute_copy", rule(permute), "a cut follows its dim");
const Register transposed("aten::transpose.int aten::transpose_copy.int", rule(transpose), "a cut follows its dim");
const Register turned("aten::t aten::t_copy", rule(t), "a cut follows its dim");

// -- Dims dropped and added --------------------------------------------------------------------------------------------------

Maps select(const Call& call) { return {without_dims(ndim_of(call), {dim_arg(call)})}; }
Maps unbind(const Call& call) { return Maps(call.outputs.size(), select(call)[0]); }
Maps unfold(const Call& call) {
  auto map = same_dims(ndim_of(call));
  if (!map.empty()) map[dim_arg(call, "dimension")].dim = -1;
  return {map};
}
Maps diagonal(const Call& call) { return {without_dims(ndim_of(call), {dim_arg(call, "dim1"), dim_arg(call, "dim2")})}; }

const Register selected("aten::select.int aten::select_copy.int", rule(select), "the other dims keep their cuts");
const Register unbound("aten::unbind.int aten::unbind_copy.int", rule(unbind), "the other dims keep their cuts");
const Register unfolded("aten::unfold aten::unfold_copy", rule(unfold), "windows need their dim whole; the others keep their cuts");
const Register on_diagonal("aten::diagonal aten::diagonal_copy", rule(diagonal), "dims off the diagonal keep their cuts");

// The last dim becomes the diagonal of two; the others keep their order around them.
Maps diag_embed(const Call& call) {
  const auto ndim = ndim_of(call);
  const auto first = wrap_dim(call.int_arg("dim1"), ndim + 1), second = wrap_dim(call.int_arg("dim2"), ndim + 1);
  auto map = same_dims(ndim);
  int64_t place = 0;
  for (int64_t d = 0; d + 1 < ndim; ++d, ++place) {
    while (place == first || place == second) ++place;
    map[d] = {place};
  }
  if (!map.empty()) map.back().dim = -1;
  return {map};
}
const Register embedded("aten::diag_embed", rule(diag_embed), "dims off the diagonal keep their cuts; any reduction of zeros is zero");

Maps expand(const Call& call) {
  const auto in = sizes_of(call);
  const auto& out = call.outputs[0].sizes;
  const auto added = static_cast<int64_t>(out.size() - in.size());
  DimMap map(in.size());
  for (size_t d = 0; d < in.size(); ++d) {
    if (in[d] == out[d + added]) map[d].dim = static_cast<int64_t>(d) + added;
  }
  return {map};
}

Lowering expand_locally(const Call& call, const Resolution& resolution) {
  const auto sizes = local_output_sizes(call, resolution, 0);
  if (sizes == call.outputs[0].sizes) return {};
  return with_arguments({{call.argument_index("size"), std::vector<int64_t>(sizes.begin(), sizes.end())}});
}

const Register expanded("aten::expand aten::expand_copy", rule(expand, expand_locally),
                        "dims that are not broadcast keep their cuts; every rank repeats its own shard");

// -- Slices ------------------------------------------------------------------------------------------------------------------

// The number that `value` stands for as a bound of a slice of `length` indices.
int64_t bound(const c10::IValue& value, int64_t if_none, int64_t length) {
  const int64_t index = value.isNone() ? if_none : value.toInt();
  return std::clamp<int64_t>(index < 0 ? index + length : index, 0, length);
}

Maps slice(const Call& call) {
  auto map = same_dims(ndim_of(call));
  const auto dim = dim_arg(call);
  const auto length = sizes_of(call)[dim];
  const auto begin = bound(call.arg("start"), 0, length);
  const auto end = std::max(begin, bound(call.arg("end"), length, length));
  map[dim] = {dim, length, begin, end};
  if (call.int_arg("step") != 1) map[dim].dim = -1;
  return {map};
}

// A bound of the whole dim as one of the local shard: blocks are equally long, so their shares agree.
Lowering slice_locally(const Call& call, const Resolution& resolution) {
  const auto dim = dim_arg(call);
  const auto image = slice(call)[0][dim];
  const auto local = resolution.in[0]->local_sizes()[dim];
  if (!image.slices() || local == image.whole) return {};
  return with_arguments({{call.argument_index("start"), image.begin * local / image.whole},
                         {call.argument_index("end"), image.end * local / image.whole}});
}

const Register slicing("aten::slice.Tensor aten::slice_copy.Tensor", rule(slice, slice_locally),
                      "a slice of whole blocks keeps their cut; the other dims keep theirs");

Maps split(const Call& call) {
  const auto dim = dim_arg(call);
  const auto length = sizes_of(call)[dim];
  Maps maps;
  int64_t begin = 0;
  for (const auto& output : call.outputs) {
    auto map = same_dims(ndim_of(call));
    const auto end = begin + output.sizes[dim];
    map[dim] = {dim, length, begin, end};
    maps.push_back(map);
    begin = end;
  }
  return maps;
}

// The local shards by their own lengths: a split by one length would make fewer of them from a shorter part.
template <bool kCopies>
Lowering split_locally(const Call& call, const Resolution& resolution) {
  const auto dim = dim_arg(call);
  if (resolution.in[0]->local_sizes()[dim] == sizes_of(call)[dim]) return {};
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < call.outputs.size(); ++i) lengths.push_back(local_output_sizes(call, resolution, i)[dim]);
  return [dim, lengths = std::move(lengths)](LocalCall& local) {
    auto parts = at::split_with_sizes(local.arg(0).toTensor(), lengths, dim);
    if constexpr (kCopies) {
      for (auto& part : parts) part = part.clone();
    }
    local.replace({std::move(parts)});
  };
}

constexpr auto kWhySplit = "slices of whole blocks keep their cut; the other dims keep theirs";
const Register parted("aten::split.Tensor aten::split_with_sizes aten::unsafe_split.Tensor aten::unsafe_split_with_sizes",
                      rule(split, split_locally<false>), kWhySplit);
const Register parted_copy("aten::split_copy.Tensor aten::split_with_sizes_copy", rule(split, split_locally<true>), kWhySplit);

// -- Other dtypes ------------------------------------------------------------------------------------------------------------

Maps view_as_complex(const Call& call) { return {without_dims(ndim_of(call), {ndim_of(call) - 1})}; }

// Both numbers of a pair lie beside each other on one device, but not in every part of another order. A part without elements has the
// strides of the whole, of which libtorch 2.14 takes an odd one for a dim of length one, not of none.
Lowering pairs_together(const Call&, const Resolution& resolution) {
  return [whole = detail::in_row_major_order(*resolution.in[0])](LocalCall& call) {
    const auto self = call.arg(0).toTensor();
    const bool fits = self.numel() > 0 && detail::shard_in_row_major_order(self, whole) && self.storage_offset() % 2 == 0;
    if (!fits) call.arg(0) = self.clone(at::MemoryFormat::Contiguous);
    call.call();
  };
}

const Register as_real("aten::view_as_real aten::view_as_real_copy", rule(identity, nullptr, Passes::sums),
                       "a dim of (real, imaginary) is added");
const Register as_complex("aten::view_as_complex aten::view_as_complex_copy", rule(view_as_complex, pairs_together, Passes::sums),
                          "the dim of (real, imaginary) must be whole");

Maps view_dtype(const Call& call) {
  auto map = same_dims(ndim_of(call));
  const bool same_width = c10::elementSize(call.outputs[0].dtype) == c10::elementSize(call.operands[0].layout->dtype());
  if (!map.empty() && !same_width) map.back().dim = -1;
  return {map};
}

const Register as_dtype("aten::view.dtype aten::view_copy.dtype", rule(view_dtype, nullptr, Passes::none),
                        "bits are read anew; elements that join or part must be together");

// -- as_strided --------------------------------------------------------------------------------------------------------------

const Register strided("aten::as_strided aten::as_strided_copy aten::as_strided_scatter", std::make_shared<AsStridedRule>(),
                       "strides address the memory of the whole tensor: replicated, laid out as one device would");

}  // namespace

}  // namespace dtensor::rules
