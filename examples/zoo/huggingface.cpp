// Hugging Face's names and orders of weights.
#include "huggingface.hpp"

#include "huggingface_rows.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/foreign.hpp>

#include <ATen/ops/cat.h>
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
    const bool is_three = row.how == How::three_in_one;
    row.theirs = known_name([&](const std::string& name) { return known.contains(name); }, row.theirs);
    const auto found = known.find(is_three ? name_of_part(row, kThree[0]) : row.theirs);
    if (found == known.end()) continue;  // tied weights; what else is missing is found missing where it is wanted
    check_sizes(found->first, found->second.sizes, row.how, counts, false);
    auto sizes = found->second.sizes;
    if (row.how == How::transposed) std::swap(sizes[0], sizes[1]);
    if (is_three) sizes[0] *= 3;
    ours.tensors.push_back({row.ours, found->second.dtype, sizes});
    by_ours[row.ours] = row;
  }
  ours.get = [=](const std::string& name) {
    const auto& row = by_ours.at(name);
    if (row.how != How::three_in_one) return converted(theirs.get(row.theirs), row.how, counts, false);
    std::vector<torch::Tensor> tensors;
    for (const auto& part : kThree) tensors.push_back(theirs.get(name_of_part(row, part)));
    return at::cat(tensors);
  };
  return ours;
}

Source to_huggingface(const std::string& config, const Source& ours) {
  const auto counts = counts_of(config);
  const auto known = by_name(ours);
  Source theirs;
  std::map<std::string, std::pair<Row, int64_t>> by_theirs;  // and which part of three
  const auto add = [&](const Row& row, const std::string& name, Described tensor, int64_t part) {
    tensor.name = name;
    theirs.tensors.push_back(tensor);
    by_theirs[name] = {row, part};
  };
  for (const auto& row : rows_of(counts)) {
    const auto found = known.find(row.ours);
    if (found == known.end()) continue;
    check_sizes(found->first, found->second.sizes, row.how, counts, true);
    auto tensor = found->second;
    if (row.how == How::transposed) std::swap(tensor.sizes[0], tensor.sizes[1]);
    if (row.how != How::three_in_one) {
      add(row, row.theirs, tensor, 0);
      continue;
    }
    tensor.sizes[0] /= 3;
    for (int64_t part = 0; part < 3; ++part) add(row, name_of_part(row, kThree[static_cast<size_t>(part)]), tensor, part);
  }
  theirs.get = [=](const std::string& name) {
    const auto& [row, part] = by_theirs.at(name);
    const auto whole = ours.get(row.ours);
    return row.how == How::three_in_one ? whole.chunk(3)[static_cast<size_t>(part)] : converted(whole, row.how, counts, true);
  };
  return theirs;
}

Source source_of(const Model& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& parameter : model.named_parameters()) tensors[parameter.key()] = parameter.value().detach();
  return dtensor::checkpoints::source_of(tensors);
}

}  // namespace zoo
