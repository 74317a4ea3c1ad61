#include "tools/opcheck/shards.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <random>

namespace dtensor::opcheck {

namespace {

bool sums_exactly(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kLong || dtype == at::kInt;
}

// Ends within the second of two ranks' pieces; more ranks have none.
Placement flat_over(const at::Tensor& tensor) { return flat(tensor.numel() / 2 + 3, 3); }

std::vector<Placement> choices(const at::Tensor& tensor, bool partials) {
  std::vector<Placement> all{replicate()};
  if (tensor.dim() > 0) all.push_back(flat_over(tensor));
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    all.push_back(shard(d));
    if (tensor.size(d) % 2 == 0 && tensor.size(d) > 2) all.push_back(strided_shard(d, 2));
  }
  if (!partials || !sums_exactly(tensor.scalar_type())) return all;
  all.push_back(partial(ReduceOp::sum));
  if (c10::isFloatingType(tensor.scalar_type())) {
    for (const auto op : {ReduceOp::avg, ReduceOp::max, ReduceOp::min}) all.push_back(partial(op));
  }
  return all;
}

std::vector<std::vector<Placement>> all_choices(const Sample& sample, bool partials) {
  std::vector<std::vector<Placement>> all;
  for (const auto& tensor : tensors_in(sample.arguments)) all.push_back(choices(tensor, partials));
  return all;
}

// The number-th combination, counting in mixed base.
Case combination(const std::vector<std::vector<Placement>>& choices, size_t number) {
  Case result;
  for (const auto& some : choices) {
    result.push_back({some[number % some.size()]});
    number /= some.size();
  }
  return result;
}

std::vector<at::Tensor> partial_parts(const at::Tensor& tensor, ReduceOp op, int64_t parts) {
  const bool whole = !c10::isFloatingType(tensor.scalar_type());
  // In eighths, so that parts of whole numbers add up to them exactly: what asks whether a number is 1 must be told.
  const auto drawn = [&] { return whole ? torch::randint_like(tensor, -4, 5) : torch::randn_like(tensor).mul(8).round().div(8); };
  std::vector<at::Tensor> result;
  if (op == ReduceOp::max || op == ReduceOp::min) {
    const auto owner = torch::randint(0, parts, tensor.sizes(), at::kLong);
    for (int64_t r = 0; r < parts; ++r) {
      const auto worse = op == ReduceOp::max ? tensor - drawn().abs() : tensor + drawn().abs();
      result.push_back(torch::where(owner == r, tensor, worse));
    }
    return result;
  }
  auto rest = op == ReduceOp::avg ? tensor * parts : tensor.clone();
  for (int64_t r = 0; r + 1 < parts; ++r) {
    result.push_back(whole ? drawn() : drawn() + 0.625 * tensor);
    rest = rest - result.back();
  }
  result.push_back(rest);
  return result;
}

at::Tensor cut_part(const at::Tensor& tensor, const Placement& placement, int64_t parts, int64_t index) {
  std::vector<at::Tensor> pieces;
  for (const auto& interval : cut(tensor.size(placement.dim), placement, parts, index)) {
    pieces.push_back(tensor.narrow(placement.dim, interval.begin, interval.length()));
  }
  return pieces.empty() ? tensor.narrow(placement.dim, 0, 0).clone() : torch::cat(pieces, placement.dim);
}

// Of the elements in a row.
at::Tensor flat_piece(const at::Tensor& tensor, const Placement& placement, int64_t index) {
  const auto part = flat_part(tensor.numel(), placement, index);
  std::vector<int64_t> sizes(tensor.dim(), 1);
  sizes.back() = part.length();
  return tensor.reshape({-1}).slice(0, part.begin, part.end).reshape(sizes).clone();
}

std::vector<at::Tensor> split_once(const at::Tensor& tensor, const Placement& placement, int64_t parts) {
  if (placement.is_partial()) return partial_parts(tensor, placement.op, parts);
  std::vector<at::Tensor> result;
  for (int64_t r = 0; r < parts; ++r) {
    result.push_back(placement.is_shard() ? cut_part(tensor, placement, parts, r)
                     : placement.is_flat() ? flat_piece(tensor, placement, r)
                                           : tensor.clone());
  }
  return result;
}

}  // namespace

bool is_turned(const at::Tensor& tensor) {
  return tensor.dim() >= 2 && !tensor.is_contiguous() && tensor.transpose(-1, -2).is_contiguous();
}

bool fits(const at::Tensor& tensor, PlacementsRef placements, c10::IntArrayRef mesh) {
  auto sizes = tensor.sizes().vec();
  for (size_t m = 0; m < placements.size(); ++m) {
    const auto& p = placements[m];
    if (p.is_flat()) return false;  // parts are no smaller tensors for a raw operator
    if (!p.is_shard()) continue;
    for (int64_t r = 0; r < mesh[m]; ++r) {
      if (sizes[p.dim] % (p.split * p.unit) != 0) return false;
    }
    if (m + 1 < placements.size() && p.split > 1) return false;  // later cuts of the parts may not divide
    sizes[p.dim] = cut_length(sizes[p.dim], p, mesh[m], 0);
  }
  return true;
}

std::vector<Case> cases_1d(const Sample& sample, size_t limit, bool partials) {
  const auto choices = all_choices(sample, partials);
  double count = 1;
  for (const auto& some : choices) count *= static_cast<double>(some.size());
  std::vector<Case> cases;
  if (count <= static_cast<double>(limit)) {
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) cases.push_back(combination(choices, i));
    return cases;
  }
  std::mt19937_64 random(7);
  // Each operand alone under every placement, then drawn ones.
  for (size_t i = 0; i < choices.size(); ++i) {
    for (const auto& choice : choices[i]) {
      Case alone(choices.size(), Placements{replicate()});
      alone[i] = {choice};
      cases.push_back(std::move(alone));
    }
  }
  // All operands alike, as far as they can be.
  for (int64_t d = 0; d < 5; ++d) {
    Case alike;
    for (const auto& some : choices) {
      const auto found = std::find(some.begin(), some.end(), shard(d));
      alike.push_back({found == some.end() ? replicate() : *found});
    }
    cases.push_back(std::move(alike));
  }
  while (cases.size() < limit) cases.push_back(combination(choices, random()));
  return cases;
}

std::vector<Case> cases_2d(const Sample& sample, size_t count, bool partials) {
  const auto choices = all_choices(sample, partials);
  std::mt19937_64 random(11);
  std::vector<Case> cases;
  for (size_t i = 0; i < count; ++i) {
    auto first = combination(choices, random());
    const auto second = combination(choices, random());
    for (size_t k = 0; k < first.size(); ++k) {
      if (first[k][0].is_flat()) first[k][0] = replicate();  // a flat cut is the last
      first[k].push_back(second[k][0]);
    }
    cases.push_back(std::move(first));
  }
  return cases;
}

Placements turned(PlacementsRef placements, int64_t ndim) {
  Placements result(placements.begin(), placements.end());
  const auto last = ndim - 1;
  for (auto& p : result) {
    if (p.is_shard() && p.dim >= last - 1) p.dim = static_cast<int16_t>(p.dim == last ? last - 1 : last);
  }
  return result;
}

std::vector<at::Tensor> parts_of(const at::Tensor& tensor, PlacementsRef placements, c10::IntArrayRef mesh) {
  // A flat cut is of memory.
  if (placements.back().is_flat() && is_turned(tensor)) return parts_of(tensor.transpose(-1, -2).contiguous(), turned(placements, tensor.dim()), mesh);
  std::vector<at::Tensor> parts{tensor};
  for (size_t m = 0; m < placements.size(); ++m) {
    std::vector<at::Tensor> finer;
    for (const auto& part : parts) {
      for (auto& piece : split_once(part, placements[m], mesh[m])) finer.push_back(std::move(piece));
    }
    parts = std::move(finer);
  }
  return parts;
}

std::string str(const Case& placements) {
  std::string text;
  for (const auto& p : placements) text += (text.empty() ? "" : ", ") + dtensor::str(p);
  return text;
}

}  // namespace dtensor::opcheck
