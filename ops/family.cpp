#include "ops/family.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/OpMathType.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/accumulate.h>
#include <range/v3/numeric/iota.hpp>

#include <algorithm>
#include <set>

namespace dtensor::rules {

namespace {

using Cuts = std::set<Cut>;

int dim_with(const Dims& dims, int letter) {
  const auto it = std::ranges::find_if(dims, [&](const Dim& d) { return d.letter == letter; });
  return it == dims.end() ? -1 : static_cast<int>(it - dims.begin());
}

std::set<int> letters_of(const Structure& structure) {
  std::set<int> letters;
  for (const auto& dims : structure.in) {
    for (const auto& dim : dims) letters.insert(dim.letter);
  }
  letters.erase(kWhole);
  return letters;
}

// The plain cut, where it gives anybody a share, and the ways in which operands have the letter cut now.
Cuts cuts_of(const Call& call, int64_t mesh_dim, const Structure& structure, int letter) {
  Cuts cuts;
  for (size_t i = 0; i < structure.in.size(); ++i) {
    const int dim = dim_with(structure.in[i], letter);
    if (dim < 0) continue;
    const auto block = structure.in[i][dim].block;
    if (structure.in[i][dim].size > block) cuts.insert(Cut());
    const auto& now = call.operands[i].placements()[mesh_dim];
    if (now.is_shard(dim) && now.unit % block == 0) cuts.insert(now.cut().with_unit(now.unit / block));
  }
  return cuts;
}

bool lacks(const Structure& structure, int letter) {
  return std::ranges::any_of(structure.out,
                     [&](const Dims& d) { return dim_with(d, letter) < 0; });
}

void add_cuts(const Call& call, int64_t mesh_dim, const Structure& structure, int letter, Candidates& result) {
  if (structure.lacking.empty() && lacks(structure, letter)) return;
  for (const auto& cut : cuts_of(call, mesh_dim, structure, letter)) {
    Candidate candidate;
    for (const auto& [costly, bytes] : structure.lowering_bytes) candidate.lowering_bytes += costly == letter ? bytes : 0;
    for (const auto& dims : structure.in) {
      const int dim = dim_with(dims, letter);
      candidate.in.push_back(dim < 0 ? replicate() : shard(dim, cut.with_unit(cut.unit * dims[dim].block)));
    }
    for (size_t i = 0; i < structure.out.size(); ++i) {
      const int dim = dim_with(structure.out[i], letter);
      candidate.out.push_back(dim < 0 ? structure.lacking[i] : shard(dim, cut.with_unit(cut.unit * structure.out[i][dim].block)));
    }
    result.push_back(std::move(candidate));
  }
}

// A norm has no sign, so other numbers cannot become parts of one. A list of single numbers that has a norm in it is one of norms, of
// which some need no reduction (to_partial looks).
bool only_numbers_become_norms(const Call& call, const Placements& now, const Candidate& candidate) {
  for (size_t i = 0; i < now.size(); ++i) {
    if (candidate.in[i].is_partial(ReduceOp::norm2) && now[i] != candidate.in[i] && call.operands[i].ndim() > 0) return false;
  }
  return true;
}

// Whether what is pending of the first operand passes through its conversion to the call's dtype, if there is one.
bool survives_conversion(const Call& call, const Candidate& candidate) {
  if (!candidate.in[0].is_partial() || !call.has("dtype") || call.arg("dtype").isNone()) return true;
  const auto kept = kept_by_conversion(call.operands[0].layout->dtype(), call.arg("dtype").toScalarType());
  return std::ranges::find(kept, candidate.in[0].op) != kept.end();
}

void add_partials(const Call& call, int64_t mesh_dim, const Structure& structure, Candidates& result) {
  Placements now;
  for (size_t i = 0; i < structure.in.size(); ++i) now.push_back(call.operands[i].placements()[mesh_dim]);
  for (auto& candidate : structure.keeps.candidates(now, structure.out.size())) {
    if (only_numbers_become_norms(call, now, candidate) && survives_conversion(call, candidate)) result.push_back(std::move(candidate));
  }
}

void add_flat(const Call& call, int64_t mesh_dim, const Structure& structure, Candidates& result) {
  std::vector<int> members(structure.in.size());
  ranges::iota(members, 0);
  const bool same = structure.lacking.empty();
  const auto flat =
      structure.elementwise ? common_flat(call, mesh_dim, members, same ? call.outputs : std::vector<OutputMeta>()) : std::nullopt;
  if (!flat) return;
  Candidate candidate{{}, same ? Placements(structure.out.size(), *flat) : structure.lacking};
  for (const auto& operand : call.operands) candidate.in.push_back(operand.ndim() > 0 ? *flat : replicate());
  result.push_back(std::move(candidate));
}

class Family final : public Rule {
 public:
  Family(StructureOf structure, LoweringOf lower, Outputs outputs)
      : structure_(std::move(structure)), lower_(std::move(lower)), outputs_(outputs) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    Candidates result;
    const auto structure = structure_(call);
    for (const int letter : letters_of(structure)) add_cuts(call, mesh_dim, structure, letter, result);
    add_flat(call, mesh_dim, structure, result);
    add_partials(call, mesh_dim, structure, result);
    for (auto& candidate : result) {
      for (const int i : structure.unread) candidate.in[i] = call.operands[i].placements()[mesh_dim];
      for (const int i : structure.shapes) {
        const auto& now = call.operands[i].placements()[mesh_dim];
        if (now.is_partial() && !candidate.in[i].is_shard()) candidate.in[i] = now;
      }
    }
    return result;
  }

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    const auto structure = structure_(call);
    std::vector<OutputMeta> all;
    for (const auto& dims : structure.out) {
      Sizes sizes;
      for (const auto& dim : dims) sizes.push_back(dim.size);
      auto strides = structure.strides.empty() ? contiguous_strides(sizes) : structure.strides[all.size()];
      all.push_back({std::move(sizes), std::move(strides), structure.dtype.value_or(call.operands[0].layout->dtype()), true});
    }
    for (const int i : structure.undefined) all[i].defined = false;
    for (const int i : structure.open) all[i].open = true;
    return all;
  }

  bool describes_outputs() const override { return outputs_ == Outputs::of_structure; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    return lower_ ? lower_(call, resolution) : Lowering();
  }

 private:
  StructureOf structure_;
  LoweringOf lower_;
  Outputs outputs_;
};

struct Replicated final : Rule {
  Candidates candidates(const Call&, int64_t) const override { return {}; }
};

}  // namespace

RulePtr family(StructureOf structure, LoweringOf lower, Outputs outputs) {
  return std::make_shared<Family>(std::move(structure), std::move(lower), outputs);
}

RulePtr replicated() { return std::make_shared<Replicated>(); }

int64_t wrap_dim(int64_t dim, int64_t ndim) { return c10::maybe_wrap_dim(dim, ndim); }

std::vector<int64_t> dims_arg(const Call& call, std::string_view name, int64_t ndim) {
  auto dims = call.has(name) ? call.ints_arg(name) : std::vector<int64_t>();
  if (dims.empty()) {
    dims.resize(ndim);
    ranges::iota(dims, 0);
  }
  for (auto& dim : dims) dim = wrap_dim(dim, ndim);
  return dims;
}

Dims lettered(c10::IntArrayRef sizes, int first) {
  Dims dims;
  for (const auto size : sizes) dims.push_back({first++, size});
  return dims;
}

Dims without_letters(c10::IntArrayRef sizes) {
  Dims dims;
  for (const auto size : sizes) dims.push_back({kWhole, size});
  return dims;
}

Structure senseless(const Call& call) {
  Structure structure;
  for (const auto& operand : call.operands) structure.in.push_back(without_letters(operand.sizes()));
  return structure;
}

std::vector<Dims> broadcast(const Call& call, c10::ArrayRef<int> operands, Dims& result) {
  int64_t ndim = 0;
  for (const int i : operands) ndim = std::max(ndim, call.operands[i].ndim());
  Sizes shape(ndim, 1);
  for (const int i : operands) {
    const auto sizes = call.operands[i].sizes();
    for (size_t d = 0; d < sizes.size(); ++d) {
      auto& size = shape[ndim - sizes.size() + d];
      if (size == 1) size = sizes[d];
    }
  }
  result = lettered(shape);
  std::vector<Dims> all;
  for (const int i : operands) {
    Dims dims;
    const auto sizes = call.operands[i].sizes();
    for (size_t d = 0; d < sizes.size(); ++d) {
      const auto& under = result[ndim - sizes.size() + d];
      dims.push_back({sizes[d] == under.size ? under.letter : kWhole, sizes[d]});
    }
    all.push_back(std::move(dims));
  }
  return all;
}

std::optional<Placement> common_flat(const Call& call, int64_t mesh_dim, const std::vector<int>& members,
                                     c10::ArrayRef<OutputMeta> outputs) {
  const Operand* first = nullptr;
  for (const int i : members) {
    if (!first && call.operands[i].placements()[mesh_dim].is_flat()) first = &call.operands[i];
  }
  if (!first) return {};
  const auto alike = [&](c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    return sizes == first->sizes() && strides == first->layout->strides();
  };
  const bool fit = std::ranges::all_of(members, [&](int i) {
    const auto& operand = call.operands[i];
    return operand.ndim() == 0 || alike(operand.sizes(), operand.layout->strides());
  });
  const bool follow = std::ranges::all_of(outputs, [&](const OutputMeta& meta) { return alike(meta.sizes, meta.strides); });
  return fit && follow ? std::optional(first->placements()[mesh_dim]) : std::nullopt;
}

bool is_cut(const LayoutPtr& layout, int64_t dim) {
  if (layout->is_flat()) return true;
  return std::ranges::any_of(layout->placements(), [&](const Placement& p) { return p.is_shard(dim); });
}

bool is_cut(const LayoutPtr& layout, c10::ArrayRef<int64_t> dims) {
  return std::ranges::any_of(dims, [&](int64_t dim) { return is_cut(layout, dim); });
}

std::vector<int64_t> cutting(const LayoutPtr& layout) {
  std::vector<int64_t> dims;
  for (int64_t m = 0; m < layout->mesh().ndim(); ++m) {
    if (layout->placements()[m].cuts() && layout->mesh().size(m) > 1) dims.push_back(m);
  }
  return dims;
}

std::vector<int64_t> cutting(const LayoutPtr& layout, int64_t dim) {
  auto dims = cutting(layout);
  std::erase_if(dims, [&](int64_t m) { return !layout->placements()[m].is_shard(dim); });
  return dims;
}

int64_t slices(const Call& call, int operand, int64_t dim) {
  const auto sizes = call.operands[operand].sizes();
  Sizes local(sizes.begin(), sizes.end());
  for (int64_t m = 0; m < call.mesh.ndim(); ++m) {
    const auto& p = call.chosen[operand][m];
    if (p.is_shard() && p.dim != dim) local[p.dim] = cut_length(local[p.dim], p, call.mesh.size(m), 0);
  }
  int64_t count = 1;
  for (int64_t d = 0; d < static_cast<int64_t>(local.size()); ++d) count *= d == dim ? 1 : local[d];
  return count;
}

at::Tensor own_rows(const at::Tensor& positions, const Intervals& held, int64_t elsewhere) {
  auto rows = at::full_like(positions, elsewhere);
  int64_t offset = 0;
  for (const auto& part : held) {
    const auto here = positions.ge(part.begin).logical_and_(positions.lt(part.end));
    rows = at::where(here, positions.sub(part.begin - offset), rows);
    offset += part.length();
  }
  return rows;
}

void check_positions(std::string_view op, const at::Tensor& positions, int64_t length, std::string_view words) {
  if (!positions.is_cpu() || positions.numel() == 0) return;
  const auto lowest = positions.min().item<int64_t>(), highest = positions.max().item<int64_t>();
  if (lowest >= 0 && highest < length) return;
  const auto what = fmt::format(fmt::runtime(words), lowest < 0 ? lowest : highest);
  require(length > 0, op, "{}; got indices from {} to {}; expected none, since the dim that they index is empty", what, lowest, highest);
  fail(op, "{}; got indices from {} to {}; expected 0 to {}", what, lowest, highest, length - 1);
}

bool is_channels_last(const Layout& layout) {
  if (layout.ndim() == 4) return c10::is_channels_last_strides_2d(layout.sizes(), layout.strides());
  return layout.ndim() == 5 && c10::is_channels_last_strides_3d(layout.sizes(), layout.strides());
}

Sizes strides_like(c10::IntArrayRef sizes, const Layout& like) {
  if (sizes.size() != static_cast<size_t>(like.ndim()) || !is_channels_last(like)) return contiguous_strides(sizes);
  const auto strides = sizes.size() == 4 ? c10::get_channels_last_strides_2d(sizes) : c10::get_channels_last_strides_3d(sizes);
  return Sizes(strides.begin(), strides.end());
}

LayoutPtr output_layout(const Call& call, const Resolution& resolution, size_t i) {
  const auto& meta = call.outputs[i];
  return Layout::get(call.mesh, resolution.out[i], meta.sizes, meta.strides, meta.dtype);
}

// It must be linear up to rounding: not where fractions or signs are cut off, nor where parts are infinite of which the sum is not.
std::vector<ReduceOp> kept_by_conversion(at::ScalarType from, at::ScalarType to) {
  const bool narrow = to == at::kHalf || c10::elementSize(to) < 2;  // the largest number is 65504 or less
  if (from != to && narrow && at::isFloatingType(from) && at::isFloatingType(to)) return kExtremes;
  if (from == to || (at::isFloatingType(from) && at::isFloatingType(to))) return kAnyPartial;
  if (at::isIntegralType(from, /*includeBool=*/false) && at::isFloatingType(to)) {
    return narrow ? kExtremes : std::vector<ReduceOp>{ReduceOp::sum, ReduceOp::min, ReduceOp::max};
  }
  return {};
}

at::Tensor widened(const at::Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

bool is_empty(c10::IntArrayRef sizes) { return c10::multiply_integers(sizes) == 0; }

Lowering zeros_of_nothing(const Call& call, const Resolution& resolution, Lowering otherwise) {
  std::vector<LayoutPtr> outputs;
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    outputs.push_back(call.outputs[i].defined ? output_layout(call, resolution, i) : LayoutPtr());
  }
  const auto nothing = [](const LayoutPtr& layout) { return layout && is_empty(layout->local_sizes()); };
  const auto any = [&](const auto& layouts) { return std::ranges::any_of(layouts, nothing); };
  if (!any(resolution.in) && !any(outputs)) return otherwise;
  return [outputs](LocalCall& local) {
    const auto options = local.arg(0).toTensor().options();
    std::vector<c10::IValue> zeros;
    for (const auto& layout : outputs) {
      zeros.emplace_back(layout ? at::zeros(layout->local_sizes(), options.dtype(layout->dtype())) : at::Tensor());
    }
    local.replace(std::move(zeros));
  };
}

RulePtr sliced(std::function<std::vector<int64_t>(const Call&)> along, KeepsPartial keeps) {
  return family([along = std::move(along), keeps = std::move(keeps)](const Call& call) {
    auto dims = lettered(call.operands[0].sizes());
    for (const auto dim : along(call)) {
      if (dim >= 0 && dim < static_cast<int64_t>(dims.size())) dims[dim].letter = kWhole;  // others are the operator's to refuse
    }
    Structure structure{{}, std::vector<Dims>(call.schema.returns().size(), dims), {}, keeps};
    structure.in.assign(call.operands.size(), dims);
    return structure;
  });
}

RulePtr sliced(std::string_view argument, KeepsPartial keeps) {
  auto along = [name = std::string(argument)](const Call& call) {
    return dims_arg(call, name, call.operands[0].ndim());
  };
  return sliced(std::move(along), std::move(keeps));
}

}  // namespace dtensor::rules
