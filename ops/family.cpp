#include "ops/family.hpp"

#include <dtensor/error.hpp>
#include <dtensor/redistribute.hpp>

#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace dtensor::rules {

namespace {

using Cuts = std::set<std::pair<int32_t, int64_t>>;  // (split, unit)

int dim_with(const Dims& dims, int letter) {
  const auto it = std::find_if(dims.begin(), dims.end(), [&](const Dim& d) { return d.letter == letter; });
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
    if (structure.in[i][dim].size > 1) cuts.emplace(1, 1);
    const auto& now = call.operands[i].placements()[mesh_dim];
    if (now.is_shard(dim)) cuts.emplace(now.split, now.unit);
  }
  return cuts;
}

bool lacks(const Structure& structure, int letter) {
  return std::any_of(structure.out.begin(), structure.out.end(),
                     [&](const Dims& d) { return dim_with(d, letter) < 0; });
}

void add_cuts(const Call& call, int64_t mesh_dim, const Structure& structure, int letter, Candidates& result) {
  if (structure.lacking.empty() && lacks(structure, letter)) return;
  for (const auto& [split, unit] : cuts_of(call, mesh_dim, structure, letter)) {
    Candidate candidate;
    for (const auto& dims : structure.in) {
      const int dim = dim_with(dims, letter);
      candidate.in.push_back(dim < 0 ? replicate() : strided_shard(dim, split, unit));
    }
    for (size_t i = 0; i < structure.out.size(); ++i) {
      const int dim = dim_with(structure.out[i], letter);
      candidate.out.push_back(dim < 0 ? structure.lacking[i] : strided_shard(dim, split, unit));
    }
    result.push_back(std::move(candidate));
  }
}

std::vector<int> everyone(size_t count) {
  std::vector<int> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Whether all of these operands are norms: a norm has no sign, so other numbers cannot become parts of one. A list of single numbers
// that has a norm in it is one of norms, of which some need no reduction (to_partial looks).
bool norms_only(const Call& call, int64_t mesh_dim, const std::vector<int>& together) {
  const auto is_norm = [&](const Operand& operand) { return operand.placements()[mesh_dim].is_partial(ReduceOp::norm2); };
  if (!together.empty()) return std::all_of(together.begin(), together.end(), [&](int i) { return is_norm(call.operands[i]); });
  return std::all_of(call.operands.begin(), call.operands.end(), [&](const auto& o) { return is_norm(o) || o.ndim() == 0; });
}

void add_partials(const Call& call, int64_t mesh_dim, const Structure& structure, Candidates& result) {
  const auto everything = everyone(structure.in.size());
  for (const auto op : structure.keeps.ops) {
    for (const auto& together : structure.keeps.together) {
      const auto& members = together.empty() ? everything : together;
      const auto is_pending = [&](int i) { return call.operands[i].placements()[mesh_dim].is_partial(op); };
      if (std::none_of(members.begin(), members.end(), is_pending)) continue;
      if (op == ReduceOp::norm2 && !norms_only(call, mesh_dim, together)) continue;
      Candidate candidate{Placements(structure.in.size(), replicate()), Placements(structure.out.size(), partial(op))};
      for (const int i : members) candidate.in[i] = partial(op);
      result.push_back(std::move(candidate));
    }
  }
}

class Family final : public Rule {
 public:
  Family(StructureOf structure, LoweringOf lower) : structure_(std::move(structure)), lower_(std::move(lower)) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    Candidates result;
    if (lower_ && has_out(call)) return result;
    const auto structure = structure_(call);
    for (const int letter : letters_of(structure)) add_cuts(call, mesh_dim, structure, letter, result);
    add_partials(call, mesh_dim, structure, result);
    for (auto& candidate : result) {
      for (const int i : structure.unread) candidate.in[i] = call.operands[i].placements()[mesh_dim];
      for (size_t i = candidate.in.size(), o = 0; i < call.operands.size(); ++i, ++o)
        candidate.in.push_back(candidate.out[o]);
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
      all.push_back({std::move(sizes), std::move(strides), call.operands[0].layout->dtype(), true});
    }
    for (const int i : structure.undefined) all[i].defined = false;
    return all;
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    return lower_ ? lower_(call, resolution) : Lowering();
  }

 private:
  StructureOf structure_;
  LoweringOf lower_;
};

struct Replicated final : Rule {
  Candidates candidates(const Call&, int64_t) const override { return {}; }
};

}  // namespace

RulePtr family(StructureOf structure, LoweringOf lower) {
  return std::make_shared<Family>(std::move(structure), std::move(lower));
}

RulePtr replicated() { return std::make_shared<Replicated>(); }

int64_t wrap_dim(int64_t dim, int64_t ndim) { return dim < 0 ? dim + std::max<int64_t>(ndim, 1) : dim; }

std::vector<int64_t> dims_arg(const Call& call, std::string_view name, int64_t ndim) {
  auto dims = call.has(name) ? call.ints_arg(name) : std::vector<int64_t>();
  if (dims.empty()) {
    dims.resize(ndim);
    std::iota(dims.begin(), dims.end(), 0);
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

bool is_cut(const LayoutPtr& layout, int64_t dim) {
  return std::any_of(layout->placements().begin(), layout->placements().end(),
                     [&](const Placement& p) { return p.is_shard(dim); });
}

bool is_cut(const LayoutPtr& layout, c10::ArrayRef<int64_t> dims) {
  return std::any_of(dims.begin(), dims.end(), [&](int64_t dim) { return is_cut(layout, dim); });
}

at::Tensor own_part(const at::Tensor& whole, const Layout& layout) {
  const Placements replicated(layout.mesh().ndim(), replicate());
  const auto get = [&](PlacementsRef placements) {
    return Layout::get(layout.mesh(), placements, whole.sizes(), whole.strides(), whole.scalar_type());
  };
  return move_local(whole, get(replicated), get(layout.placements())).get();
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

void check_positions(std::string_view op, const at::Tensor& positions, int64_t length) {
  if (!positions.is_cpu() || positions.numel() == 0) return;
  const auto lowest = positions.min().item<int64_t>(), highest = positions.max().item<int64_t>();
  require(lowest >= 0 && highest < length, op, "index out of range; got indices from {} to {}; expected 0 to {}",
          lowest, highest, length - 1);
}

bool has_out(const Call& call) { return !call.schema.arguments().empty() && call.schema.arguments().back().is_out(); }

RulePtr sliced(std::function<std::vector<int64_t>(const Call&)> along, KeepsPartial keeps) {
  return family([along = std::move(along), keeps = std::move(keeps)](const Call& call) {
    auto dims = lettered(call.operands[0].sizes());
    for (const auto dim : along(call)) {
      if (dim < static_cast<int64_t>(dims.size())) dims[dim].letter = kWhole;
    }
    Structure structure{{}, std::vector<Dims>(call.schema.returns().size(), dims), {}, keeps};
    for (const auto& operand : call.operands) {
      if (!call.schema.arguments()[operand.argument].is_out()) structure.in.push_back(dims);
    }
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
