// Hugging Face's tensors into the shards of a model. An index says where each box of a tensor is in a file, so rows in another order, and
// several tensors in one, are the same bytes under another index.
#include "huggingface.hpp"
#include "huggingface_rows.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <tuple>

namespace zoo {

namespace {

using dtensor::Interval;
using dtensor::checkpoints::Index;
using dtensor::checkpoints::SavedTensor;

// Theirs has a head's rows as [2, pairs], ours as [pairs, 2].
SavedTensor with_rows_in_our_order(const SavedTensor& theirs, int64_t heads) {
  const auto rows = theirs.sizes[0] / heads, pairs = rows / 2;
  SavedTensor ours{theirs.dtype, theirs.sizes, {}};
  for (const auto& piece : theirs.pieces) {
    const auto item = static_cast<int64_t>(c10::elementSize(ours.dtype));
    const auto bytes = dtensor::checkpoints::numel_of(piece.box) / std::max<int64_t>(piece.box[0].length(), 1) * item;  // of a row
    for (auto row = piece.box[0].begin; row < piece.box[0].end; ++row) {
      const auto head = row / rows, half = row % rows / pairs, pair = row % pairs, own = head * rows + pair * 2 + half;
      auto one = piece;
      one.box[0] = Interval{own, own + 1};
      one.offset += (row - piece.box[0].begin) * bytes;
      one.sums.clear();
      ours.pieces.push_back(std::move(one));
    }
  }
  return ours;
}

// The parts, one behind the other, or one above the other where they are stacked.
SavedTensor joined(const Index& theirs, const Row& row, const Counts& counts) {
  const bool is_stacked = row.how == How::stacked;
  const auto parts = parts_of(row, counts);
  const auto first = name_of_part(row, 0);
  SavedTensor ours;
  std::vector<int64_t> sizes;  // of a part
  for (int64_t i = 0; i < parts; ++i) {
    const auto name = name_of_part(row, i);
    const auto* found = theirs.find(name);
    dtensor::require(found != nullptr, "zoo", "the checkpoint has no '{}'; expected it beside '{}'", name, first);
    if (i == 0) ours.dtype = found->dtype, sizes = found->sizes;
    dtensor::require(found->sizes == sizes && found->dtype == ours.dtype, "zoo", "'{}' is {}[{}]; expected {}[{}], as '{}' is", name,
                     c10::toString(found->dtype), fmt::join(found->sizes, ", "), c10::toString(ours.dtype), fmt::join(sizes, ", "), first);
    for (auto piece : found->pieces) {
      if (is_stacked) piece.box.insert(piece.box.begin(), Interval{i, i + 1});
      else piece.box[0] = Interval{piece.box[0].begin + i * sizes[0], piece.box[0].end + i * sizes[0]};
      ours.pieces.push_back(std::move(piece));
    }
  }
  ours.sizes = sizes;
  if (is_stacked) ours.sizes.insert(ours.sizes.begin(), counts.experts);
  else ours.sizes[0] *= parts;
  return ours;
}

// Of [experts, 2 hidden, dim] the first half of each expert's rows, or the second.
SavedTensor half_of_rows(const SavedTensor& theirs, bool is_first) {
  const auto hidden = theirs.sizes[1] / 2, from = is_first ? 0 : hidden;
  SavedTensor ours{theirs.dtype, {theirs.sizes[0], hidden, theirs.sizes[2]}, {}};
  for (const auto& piece : theirs.pieces) {
    const auto& [experts, rows, columns] = std::tie(piece.box[0], piece.box[1], piece.box[2]);
    const Interval wanted{std::max(rows.begin, from), std::min(rows.end, from + hidden)};
    if (wanted.begin >= wanted.end) continue;
    const auto bytes = columns.length() * static_cast<int64_t>(c10::elementSize(ours.dtype));  // of a row
    for (auto expert = experts.begin; expert < experts.end; ++expert) {
      auto one = piece;
      one.box = {Interval{expert, expert + 1}, Interval{wanted.begin - from, wanted.end - from}, columns};
      one.offset += ((expert - experts.begin) * rows.length() + wanted.begin - rows.begin) * bytes;
      one.sums.clear();
      ours.pieces.push_back(std::move(one));
    }
  }
  return ours;
}

// Their tensor, or tensors, as the one of ours.
SavedTensor ours_of(const Index& theirs, const SavedTensor& found, const Row& row, const Counts& counts) {
  switch (row.how) {
    case How::three_in_one:
    case How::stacked: return joined(theirs, row, counts);
    case How::rotary: return with_rows_in_our_order(found, counts.heads);
    case How::kv_rotary: return with_rows_in_our_order(found, counts.kv_heads);
    case How::head_rotary: return with_rows_in_our_order(found, 1);
    case How::gates:
    case How::ups: return half_of_rows(found, row.how == How::gates);
    default: return found;
  }
}

constexpr const char* kPart = "model.";

// Their tensors under our names, `transposed` those that are so in the files.
struct Ours {
  Index index, transposed;
};

Ours ours_of(const std::string& config, const Index& theirs) {
  const auto counts = counts_of(config);
  Ours ours{theirs, theirs};
  for (auto* index : {&ours.index, &ours.transposed}) index->tensors.clear(), index->same_as.clear(), index->values.clear();
  for (auto row : rows_of(counts)) {
    row.theirs = known_name([&](const std::string& name) { return theirs.find(name) != nullptr; }, row.theirs);
    const auto name = name_of_part(row, 0);
    const auto* found = theirs.find(name);
    auto& index = row.how == How::transposed ? ours.transposed : ours.index;
    // Tied weights, and other forms; what else is missing is found missing where it is wanted.
    if (!found || index.tensors.contains(kPart + row.ours)) continue;
    check_sizes(name, found->sizes, row.how, counts, false);
    index.tensors[kPart + row.ours] = ours_of(theirs, *found, row, counts);
  }
  return ours;
}

// A tensor of the transposed sizes, shared out among the ranks that have the parameter.
at::Tensor transposed_like(const at::Tensor& parameter) {
  const std::vector<int64_t> sizes{parameter.size(1), parameter.size(0)};
  if (!dtensor::is_dtensor(parameter)) return at::empty(sizes, parameter.options());
  const dtensor::DTensor known(parameter);
  return dtensor::empty(sizes, known.mesh(), dtensor::Placements(known.mesh().ndim(), dtensor::shard(0)), parameter.dtype()).tensor();
}

bool is_elsewhere(const at::Tensor& parameter) {
  return dtensor::is_deferred(parameter) || (dtensor::is_dtensor(parameter) && dtensor::DTensor(parameter).is_absent());
}

// Throws unless the model has these matrices, the other way round. The same on every rank.
void check_transposed(const torch::OrderedDict<std::string, at::Tensor>& parameters, const Index& transposed) {
  std::vector<std::string> problems;
  for (const auto& [name, tensor] : transposed.tensors) {
    const auto* parameter = parameters.find(name.substr(std::string(kPart).size()));
    const std::vector<int64_t> expected{tensor.sizes[1], tensor.sizes[0]};
    if (parameter && parameter->sizes() == at::IntArrayRef(expected)) continue;
    problems.push_back(fmt::format("'{}' is [{}], transposed, in the checkpoint and {} in the model", name, fmt::join(tensor.sizes, ", "),
                                   parameter ? fmt::format("[{}]", fmt::join(parameter->sizes(), ", ")) : "missing"));
  }
  dtensor::require(problems.empty(), "zoo", "{}; hint: is config.json of this model?", fmt::join(problems, "; "));
}

}  // namespace

void load(Model& model, const std::string& config, const Index& theirs) {
  const dtensor::NoSpmd plain;
  const torch::NoGradGuard no_grad;
  const auto ours = ours_of(config, theirs);
  dtensor::LoadOptions options;
  options.convert = true;  // to the dtype of the model
  for (const auto& [name, tensor] : ours.transposed.tensors) options.without.push_back(name);
  auto parameters = model.named_parameters();
  check_transposed(parameters, ours.transposed);
  dtensor::load({{"model", model}}, ours.index, options);
  for (const auto& [name, tensor] : ours.transposed.tensors) {
    auto* parameter = parameters.find(name.substr(std::string(kPart).size()));
    dtensor::State state;
    at::Tensor there;
    if (!is_elsewhere(*parameter)) {
      there = transposed_like(*parameter);
      state.add({name, there});
    }
    dtensor::load(state, ours.transposed, {.only = {name}, .convert = true});
    if (there.defined()) parameter->copy_(there.t());
  }
}

}  // namespace zoo
