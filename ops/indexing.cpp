// Reading and writing by index. An indexed dim is whole; the dims of the index and all other dims may be sharded.
#include "ops/family.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace dtensor::rules {
namespace {

// Letters: dims of the indexed tensor count from 0, of indices from kIndex, indexed dims that are written to from
// kWritten.
enum : int { kIndex = 100, kWritten = 200 };

const KeepsPartial kMoves{kAnyPartial, {{0}}};

// -- Writing to a dim that is cut -------------------------------------------------------------------------------------

bool is_mask(const Operand& operand) {
  return operand.layout->dtype() == at::kBool || operand.layout->dtype() == at::kByte;
}

// An indexed dim of the written tensor that is cut: what this rank has of it, and which argument indexes it.
struct Own {
  int64_t dim, length;
  Intervals held;
  int argument, element;
};

std::vector<Own> own_dims(const Call& call, const LayoutPtr& self) {
  std::vector<Own> owns;
  const auto add = [&](int64_t dim, int argument, int element) {
    if (!is_cut(self, dim)) return;
    owns.push_back({dim, self->sizes()[dim], self->intervals(dim, call.mesh.coordinate()), argument, element});
  };
  const int list = call.argument_index("indices");
  if (list < 0) add(wrap_dim(call.int_arg("dim"), self->ndim()), call.argument_index("index"), -1);
  for (const auto& operand : call.operands) {
    if (operand.argument == list && !is_mask(operand)) add(operand.element, list, operand.element);
  }
  return owns;
}

// One more row for what other ranks write.
at::Tensor with_spare_row(const at::Tensor& tensor, int64_t dim) {
  auto sizes = tensor.sizes().vec();
  sizes[dim] = 1;
  return at::cat({tensor, tensor.new_zeros(sizes)}, dim);
}

at::Tensor own_positions(std::string_view op, const at::Tensor& index, const Own& own, int64_t elsewhere) {
  const bool may_count_from_end = own.element >= 0 || op.starts_with("aten::index_fill");  // what is in a list, and there
  const auto from_start = may_count_from_end ? at::where(index.lt(0), index.add(own.length), index) : index;
  check_positions(op, from_start, own.length,
                  fmt::format("index {{}} is out of bounds for dimension {} with size {}", own.dim, own.length));
  return own_rows(from_start, own.held, elsewhere);
}

// Each rank does all the writes to its part; those that belong to others go to a spare row that is cut off again.
Lowering write_own(const Call& call, const Resolution& resolution) {
  const auto owns = own_dims(call, resolution.in[0]);
  if (owns.empty()) return {};
  return [owns, in_place = call.in_place, op = call.schema.name()](LocalCall& local) {
    const auto self = local.arg(0).toTensor();
    auto longer = self;
    for (const auto& own : owns) {
      auto& argument = local.arg(own.argument);
      longer = with_spare_row(longer, own.dim);
      const auto elsewhere = self.size(own.dim);
      if (own.element < 0) {
        argument = own_positions(op, argument.toTensor(), own, elsewhere);
      } else {
        c10::List<c10::optional<at::Tensor>> list;
        for (const auto& index : argument.toListRef()) {
          list.push_back(index.isNone() ? c10::optional<at::Tensor>() : index.toTensor());
        }
        list.set(own.element, own_positions(op, argument.toListRef()[own.element].toTensor(), own, elsewhere));
        argument = std::move(list);
      }
    }
    local.arg(0) = longer;
    local.call();
    auto result = local.arg(0).toTensor();
    for (const auto& own : owns) result = result.narrow(own.dim, 0, self.size(own.dim));
    local.replace({in_place ? self.copy_(result) : result.clone(at::MemoryFormat::Contiguous)});  // no stride of the spare row stays
  };
}

// -- One index along one dim ------------------------------------------------------------------------------------------

Structure index_select(const Call& call) {
  auto self = lettered(call.operands[0].sizes());
  const auto index = lettered(call.operands[1].sizes(), kIndex);
  auto out = self;
  if (!self.empty()) {
    const auto dim = wrap_dim(call.int_arg("dim"), call.operands[0].ndim());
    self[dim].letter = kWhole;
    out[dim] = index.empty() ? Dim{} : index[0];
  }
  return {{self, self.empty() ? without_letters(call.operands[1].sizes()) : index}, {out}, {}, kMoves};
}

// Dims of self and of the tensors that run alongside it: a dim is free where all have the same size, and `dim` is
// whole.
std::vector<Dims> alongside(const Call& call, int64_t dim) {
  std::vector<Dims> in;
  for (const auto& operand : call.operands) in.push_back(lettered(operand.sizes()));
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
    bool free = d != dim;
    for (const auto& dims : in) free &= d >= static_cast<int64_t>(dims.size()) || dims[d].size == in[0][d].size;
    for (auto& dims : in) {
      if (!free && d < static_cast<int64_t>(dims.size())) dims[d].letter = kWhole;
    }
  }
  return in;
}

Structure gather(const Call& call) {
  const auto dim = wrap_dim(call.int_arg("dim"), call.operands[0].ndim());
  auto in = alongside(call, dim);
  if (!in[0].empty() && !in[1].empty()) in[1][dim].letter = kIndex;  // each index is looked up by itself
  const auto out = in[1];
  return {std::move(in), {out}, {}, kMoves};
}

// The dim that is written to may be cut: index and source are whole then, and each rank writes its part; see write_own.
Structure written_along(int64_t dim, std::vector<Dims> in, const KeepsPartial& keeps) {
  if (!in[0].empty()) in[0][dim].letter = kWritten;
  const auto out = in[0];
  return {std::move(in), {out}, {}, keeps};
}

KeepsPartial moves(const Call&) { return {kAnyPartial, {{0, 2}}}; }
KeepsPartial sums(const Call&) { return {kSums, {{0, 2}}}; }
KeepsPartial number(const Call& call) { return {kept_by_number(call.arg("value").toScalar()), {{0}}}; }
KeepsPartial nothing(const Call&) { return {}; }

// By the argument `reduce`: what is added adds up.
KeepsPartial as_reduced(const Call& call) {
  const auto& name = call.arg("reduce").toStringRef();
  return name == "sum" || name == "add" ? sums(call) : nothing(call);
}

RulePtr scatter(KeepsPartial (*keeps)(const Call&)) {
  auto structure = [keeps](const Call& call) {
    const auto dim = wrap_dim(call.int_arg("dim"), call.operands[0].ndim());
    return written_along(dim, alongside(call, dim), keeps(call));
  };
  return family(std::move(structure), write_own);
}

// Of 16 bits, libtorch's kernel for a dim of length one reads beside its operands: so no dim is cut, and no shard becomes one.
bool reads_beside(const Call& call) {
  return call.schema.name().rfind("aten::index_reduce", 0) == 0 && c10::elementSize(call.operands[0].layout->dtype()) == 2;
}

// index_add and its kin: `index` is a list of positions along `dim`; source runs alongside self elsewhere.
RulePtr index_write(KeepsPartial (*keeps)(const Call&)) {
  auto structure = [keeps](const Call& call) {
    const auto& self = call.operands[0];
    const bool whole = reads_beside(call);
    const auto dim = wrap_dim(call.int_arg("dim"), self.ndim());
    std::vector<Dims> in;
    for (const auto& operand : call.operands) {
      const bool runs_along = operand.ndim() == self.ndim() && operand.argument != call.argument_index("index");
      in.push_back(runs_along ? lettered(operand.sizes()) : without_letters(operand.sizes()));
      if (runs_along && self.ndim() > 0) in.back()[dim].letter = kWhole;
      for (int64_t d = 0; runs_along && d < self.ndim(); ++d) {
        if (whole || operand.sizes()[d] != self.sizes()[d]) in.back()[d].letter = kWhole;  // source broadcasts
      }
    }
    return written_along(dim, std::move(in), keeps(call));
  };
  return family(std::move(structure), write_own);
}

// -- Lists of indices: self[i, :, j] ----------------------------------------------------------------------------------

struct Indexed {
  bool by_position = true;    // false: a mask among the indices
  std::vector<Dims> indices;  // of the defined ones
  Dims self, result;
};

// The dims of self[indices]: the indices' broadcast shape stands where the indexed dims were, if those are neighbours,
// and in front otherwise.
Indexed look(const Call& call) {
  Indexed indexed;
  const int argument = call.argument_index("indices");
  const auto count = static_cast<int64_t>(call.arguments[argument].toListRef().size());
  indexed.self = lettered(call.operands[0].sizes());
  std::vector<int> operands;
  int64_t first = -1, last = -1;
  for (int64_t d = 0; d < count; ++d) {
    const int i = call.operand_index(argument, static_cast<int>(d));
    if (i < 0) continue;
    if (is_mask(call.operands[i])) {
      indexed.by_position = false;
      return indexed;
    }
    operands.push_back(i);
    indexed.self[d].letter = kWhole;
    first = first < 0 ? d : first;
    last = d;
  }
  Dims shape;
  indexed.indices = broadcast(call, operands, shape);
  const auto shift = [](Dims& dims) {
    for (auto& dim : dims) dim.letter += dim.letter == kWhole ? 0 : kIndex;
  };
  for (auto& dims : indexed.indices) shift(dims);
  shift(shape);
  const bool neighbours = last - first + 1 == static_cast<int64_t>(operands.size());
  const int64_t place = neighbours ? std::max<int64_t>(first, 0) : 0;
  for (const auto& dim : indexed.self) {
    if (dim.letter != kWhole) indexed.result.push_back(dim);
  }
  indexed.result.insert(indexed.result.begin() + place, shape.begin(), shape.end());
  return indexed;
}

Structure index(const Call& call) {
  auto indexed = look(call);
  Structure structure{{}, {}, {}, kMoves};
  if (!indexed.by_position) {  // how many elements a mask selects is not in the metadata
    for (const auto& operand : call.operands) structure.in.push_back(without_letters(operand.sizes()));
    structure.keeps = {};
    return structure;
  }
  structure.in = std::move(indexed.indices);
  structure.in.insert(structure.in.begin(), std::move(indexed.self));
  structure.out = {std::move(indexed.result)};
  return structure;
}

// self[mask] = one value, with a mask over self's first dims, is pointwise.
bool is_masked_fill(const Call& call) {
  return call.operands.size() == 3 && is_mask(call.operands[1]) && call.operands[1].element == 0 &&
         call.operands[2].ndim() == 0 && call.operands[1].ndim() <= call.operands[0].ndim();
}

Structure index_put(const Call& call) {
  const auto& self = call.operands[0];
  auto indexed = look(call);
  const int last = static_cast<int>(call.operands.size()) - 1;
  const KeepsPartial keeps{call.bool_arg("accumulate") ? kSums : kAnyPartial, {{0, last}}};
  if (is_masked_fill(call)) {
    const auto dims = lettered(self.sizes());
    return {{dims, Dims(dims.begin(), dims.begin() + call.operands[1].ndim()), {}}, {dims}, {}, keeps};
  }
  Structure structure{{}, {indexed.self}, {}, {}};
  if (!indexed.by_position) {
    for (const auto& operand : call.operands) structure.in.push_back(without_letters(operand.sizes()));
    structure.out = {structure.in[0]};
    return structure;
  }
  for (size_t d = 0; d < indexed.self.size(); ++d) {
    auto& letter = indexed.self[d].letter;
    if (letter == kWhole) letter = kWritten + static_cast<int>(d);
  }
  structure.out = {indexed.self};
  structure.in.push_back(indexed.self);
  for (size_t i = 1; i + 1 < call.operands.size(); ++i)
    structure.in.push_back(without_letters(call.operands[i].sizes()));
  // Values broadcast to the shape of self[indices].
  auto values = without_letters(call.operands.back().sizes());
  for (size_t d = 0; d < values.size(); ++d) {
    const auto& under = indexed.result[indexed.result.size() - values.size() + d];
    if (under.letter < kIndex && under.size == values[d].size) values[d].letter = under.letter;
  }
  structure.in.push_back(std::move(values));
  structure.keeps = keeps;
  return structure;
}

Structure take(const Call& call) {
  const auto index = lettered(call.operands[1].sizes());
  return {{without_letters(call.operands[0].sizes()), index}, {index}, {}, kMoves};
}

// self.put_(index, source): positions in self as one row of elements. Every rank has all of them and writes those that it holds.
class Put final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const auto& now = call.operands[0].placements()[mesh_dim];
    if (now.is_partial() && !call.bool_arg("accumulate")) return {{{now, replicate(), now}, {now}}};  // elements only move
    if (!now.is_shard()) return {};
    return {{{now, replicate(), replicate()}, {now}}};
  }

  std::vector<Sizes> output_sizes(const Call& call) const override { return {Sizes(call.operands[0].sizes())}; }

  Lowering lower(const Call&, const Resolution& resolution) const override {
    if (resolution.in[0]->is_replicated()) return {};
    return [layout = resolution.in[0]](LocalCall& local) {
      const auto [own, positions] = local_positions(local.arg(1).toTensor().reshape({-1}), *layout);
      local.arg(1) = positions.index_select(0, own);
      local.arg(2) = local.arg(2).toTensor().reshape({-1}).index_select(0, own);
      local.call();
    };
  }

 private:
  // Which of the indices this rank holds, and where in its part all of them would be.
  static std::pair<at::Tensor, at::Tensor> local_positions(const at::Tensor& index, const Layout& layout) {
    const auto strides = contiguous_strides(layout.sizes()), local_strides = contiguous_strides(layout.local_sizes());
    int64_t count = 1;
    for (const auto size : layout.sizes()) count *= size;
    const auto from_start = at::where(index.lt(0), index.add(count), index);
    check_positions("aten::put_", from_start, count);
    auto held = at::ones_like(index, at::kBool);
    auto positions = at::zeros_like(index);
    for (int64_t d = 0; d < layout.ndim(); ++d) {
      const auto here = from_start.div(strides[d], "floor").remainder(layout.sizes()[d]);
      const auto rows = own_rows(here, layout.intervals(d, layout.mesh().coordinate()), -1);
      held.logical_and_(rows.ge(0));
      positions.add_(rows.mul(local_strides[d]));
    }
    return {held.nonzero().squeeze(1), positions};
  }
};

struct DataDependent final : Rule {
  Candidates candidates(const Call&, int64_t) const override { return {}; }
  bool data_dependent() const override { return true; }
};

// -- The table --------------------------------------------------------------------------------------------------------

const Register select("aten::index_select", family(index_select), "every index, and every other dim, by itself");
const Register gathering("aten::gather", family(gather), "every index by itself, alongside self in the other dims");
const Register taking("aten::take", family(take), "every index by itself");
const Register scattering("aten::scatter.src", scatter(moves), "dims alongside are independent");
const Register scatter_number("aten::scatter.value", scatter(number), "dims alongside are independent; one number is written");
const Register scatter_sum("aten::scatter_add", scatter(sums), "dims alongside are independent; linear in self and src");
const Register scatter_reduced("aten::scatter.reduce aten::scatter_reduce", scatter(as_reduced),
                               "dims alongside are independent; a sum is linear in self and src");
const Register scatter_rest("aten::scatter", scatter(nothing), "dims alongside are independent");
const Register add("aten::index_add", index_write(sums), "dims alongside are independent; linear in self and source");
const Register copy("aten::index_copy", index_write(moves), "dims alongside are independent");
const Register fill("aten::index_fill.int_Scalar", index_write(number), "dims alongside are independent; one number is written");
const Register rest("aten::index_fill aten::index_reduce", index_write(nothing), "dims alongside are independent");
const Register indexing("aten::index.Tensor aten::_unsafe_index.Tensor", family(index),
                        "every index, and every other dim, by itself");
const Register putting("aten::index_put aten::_index_put_impl aten::_unsafe_index_put", family(index_put, write_own),
                       "dims that are not indexed are independent; in those that are, each rank writes its part");
const Register put("aten::put", std::make_shared<Put>(), "every index by itself; each rank writes what it holds");
const Register unknown_sizes(
    "aten::nonzero aten::masked_select aten::_unique aten::_unique2 aten::unique_dim "
    "aten::unique_consecutive aten::unique_dim_consecutive aten::bincount",
    std::make_shared<DataDependent>(), "what comes out, or where, depends on all values");

}  // namespace
}  // namespace dtensor::rules
