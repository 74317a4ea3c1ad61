// Hugging Face's names and orders of weights.
#include "huggingface.hpp"

#include "huggingface_rows.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/foreign.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <fmt/ranges.h>

#include <map>

namespace zoo {

namespace {

using dtensor::checkpoints::Source;
using Described = Source::Described;

// [heads, first, second, ...] with the two swapped: from pairs to halves of a head where `first` is dim / 2, and back where it is 2.
torch::Tensor reordered(const torch::Tensor& weight, int64_t heads, bool to_halves) {
  const auto rows = weight.size(0), pairs = rows / heads / 2;
  std::vector<int64_t> sizes{heads, to_halves ? pairs : 2, to_halves ? 2 : pairs};
  for (int64_t d = 1; d < weight.dim(); ++d) sizes.push_back(weight.size(d));
  return weight.reshape(sizes).transpose(1, 2).reshape(weight.sizes());
}

torch::Tensor converted(const torch::Tensor& weight, How how, const Counts& counts, bool to_theirs) {
  switch (how) {
    case How::transposed: return weight.t().contiguous();
    case How::rotary: return reordered(weight, counts.heads, to_theirs);
    case How::kv_rotary: return reordered(weight, counts.kv_heads, to_theirs);
    case How::head_rotary: return reordered(weight, 1, to_theirs);
    case How::gates: return weight.chunk(2, 1)[0];
    case How::ups: return weight.chunk(2, 1)[1];
    default: return weight;
  }
}

std::map<std::string, Described> by_name(const Source& source) {
  std::map<std::string, Described> all;
  for (const auto& tensor : source.tensors) all.emplace(tensor.name, tensor);
  return all;
}

}  // namespace

Source from_huggingface(const std::string& config, const Source& theirs) {
  const auto counts = counts_of(config);
  const auto known = by_name(theirs);
  Source ours;
  std::map<std::string, Row> by_ours;
  for (auto row : rows_of(counts)) {
    row.theirs = known_name([&](const std::string& name) { return known.contains(name); }, row.theirs);
    const auto found = known.find(name_of_part(row, 0));
    // Tied weights, and other forms; what else is missing is found missing where it is wanted.
    if (found == known.end() || by_ours.contains(row.ours)) continue;
    check_sizes(found->first, found->second.sizes, row.how, counts, false);
    for (int64_t part = 1; part < parts_of(row, counts); ++part)
      dtensor::require(known.contains(name_of_part(row, part)), "zoo", "the checkpoint has no '{}'; expected it beside '{}'",
                       name_of_part(row, part), found->first);
    auto sizes = found->second.sizes;
    if (row.how == How::transposed) std::swap(sizes[0], sizes[1]);
    if (row.how == How::three_in_one) sizes[0] *= 3;
    if (row.how == How::stacked) sizes.insert(sizes.begin(), counts.experts);
    if (row.how == How::gates || row.how == How::ups) sizes[1] /= 2;
    ours.tensors.push_back({row.ours, found->second.dtype, sizes});
    by_ours[row.ours] = row;
  }
  ours.get = [=](const std::string& name) {
    const auto& row = by_ours.at(name);
    std::vector<torch::Tensor> tensors;
    for (int64_t part = 0; part < parts_of(row, counts); ++part) tensors.push_back(theirs.get(name_of_part(row, part)));
    if (row.how == How::stacked) return at::stack(tensors);
    return row.how == How::three_in_one ? at::cat(tensors) : converted(tensors[0], row.how, counts, false);
  };
  return ours;
}

Source to_huggingface(const std::string& config, const Source& ours) {
  const auto counts = counts_of(config);
  const auto known = by_name(ours);
  Source theirs;
  std::map<std::string, std::pair<Row, int64_t>> by_theirs;  // and which part of it
  const auto add = [&](const Row& row, const std::string& name, Described tensor, int64_t part) {
    tensor.name = name;
    theirs.tensors.push_back(tensor);
    by_theirs[name] = {row, part};
  };
  for (const auto& row : rows_of(counts)) {
    const auto found = known.find(row.ours);
    if (found == known.end() || row.is_only_read) continue;
    check_sizes(found->first, found->second.sizes, row.how, counts, true);
    auto tensor = found->second;
    if (row.how == How::transposed) std::swap(tensor.sizes[0], tensor.sizes[1]);
    if (row.how == How::three_in_one) tensor.sizes[0] /= 3;
    if (row.how == How::stacked) tensor.sizes.erase(tensor.sizes.begin());
    for (int64_t part = 0; part < parts_of(row, counts); ++part) add(row, name_of_part(row, part), tensor, part);
  }
  // The parts of a tensor are asked for one after the other: it is not read for each of them.
  const auto last = std::make_shared<std::pair<std::string, torch::Tensor>>();
  theirs.get = [=](const std::string& name) {
    const auto& [row, part] = by_theirs.at(name);
    if (last->first != row.ours) {
      last->second.reset();
      *last = {row.ours, ours.get(row.ours)};
    }
    const auto whole = last->second;
    if (row.how == How::stacked) return whole.select(0, part);
    return row.how == How::three_in_one ? whole.chunk(3)[static_cast<size_t>(part)] : converted(whole, row.how, counts, true);
  };
  return theirs;
}

Source source_of(const Model& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& parameter : model.named_parameters()) tensors[parameter.key()] = parameter.value().detach();
  for (const auto& buffer : model.named_buffers()) tensors[buffer.key()] = buffer.value();
  return dtensor::checkpoints::source_of(tensors);
}

}  // namespace zoo
