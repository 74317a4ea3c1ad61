#include "tools/opcheck/shards.hpp"

#include <range/v3/numeric/iota.hpp>
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
  for (const auto& tensor : tensors_in(sample.arguments)) all.push_back(choices(stored(tensor), partials));
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
  const auto share = whole ? tensor : tensor.nan_to_num(0, 0, 0) * 0.625;  // infinities are in the last part
  for (int64_t r = 0; r + 1 < parts; ++r) {
    result.push_back(whole ? drawn() : drawn() + share);
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
  const auto part = flat_shard(tensor.numel(), placement, index);
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

std::vector<int64_t> memory_order(const at::Tensor& tensor) {
  std::vector<int64_t> order(tensor.dim());
  ranges::iota(order, 0);
  if (tensor.is_contiguous()) return order;
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return order;
}

bool is_in_order(c10::IntArrayRef order) { return std::ranges::is_sorted(order); }

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
      const auto found = std::ranges::find(some, shard(d));
      alike.push_back({found == some.end() ? replicate() : *found});
    }
    cases.push_back(std::move(alike));
  }
  while (cases.size() < limit) cases.push_back(combination(choices, random()));
  return cases;
}

std::vector<Case> cases_drawn(const Sample& sample, size_t count, bool partials, size_t mesh_dims) {
  const auto choices = all_choices(sample, partials);
  std::mt19937_64 random(std::hash<std::string>()(sample.text));
  const auto drawn = [&](const std::vector<Placement>& some) { return random() % 3 == 0 ? replicate() : some[random() % some.size()]; };
  std::vector<Case> cases(count, Case(choices.size()));
  for (auto& placements : cases) {
    for (size_t k = 0; k < choices.size(); ++k) {
      for (size_t m = 0; m < mesh_dims; ++m) {
        const auto placement = drawn(choices[k]);
        placements[k].push_back(placement.is_flat() && m + 1 < mesh_dims ? replicate() : placement);  // a flat cut is the last
      }
    }
  }
  return cases;
}

Placements permuted(PlacementsRef placements, c10::IntArrayRef order) {
  Placements result(placements.begin(), placements.end());
  for (auto& p : result) {
    if (p.is_shard()) p.dim = static_cast<int16_t>(std::ranges::find(order, p.dim) - order.begin());
  }
  return result;
}

std::vector<at::Tensor> parts_of(const at::Tensor& tensor, PlacementsRef placements, c10::IntArrayRef mesh) {
  if (const auto order = memory_order(tensor); placements.back().is_flat() && !is_in_order(order)) {  // a flat cut is of memory
    return parts_of(tensor.permute(order).contiguous(), permuted(placements, order), mesh);
  }
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
