// Checks and normal form of placements.
#include "src/mesh/cut_check.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>

#include <algorithm>

namespace dtensor::detail {

namespace {

// The lengths that a tensor dim may have on some rank after the cuts so far. More than one only after an uneven cut.
using Lengths = c10::SmallVector<int64_t, 4>;

void add(Lengths& lengths, int64_t length) {
  if (std::ranges::find(lengths, length) == lengths.end()) lengths.push_back(length);
}

// The lengths of all parts. torch.chunk leaves full parts, at most one shorter part, and empty ones.
void cut_all(Lengths& lengths, const Placement& placement, int64_t parts) {
  Lengths result;
  const int64_t block = placement.split * placement.unit;
  for (int64_t length : lengths) {
    for (int64_t i = 0; placement.shares && i < parts; ++i) add(result, cut_length(length, placement, parts, i));
    if (placement.shares) continue;
    const int64_t middle = length / block;
    const int64_t each = (middle + parts - 1) / parts;
    if (each == 0) {
      add(result, 0);
      continue;
    }
    const int64_t full = middle / each, rest = middle % each;
    add(result, each * block);
    if (rest) add(result, rest * block);
    if (full + (rest > 0) < parts) add(result, 0);
  }
  lengths = std::move(result);
}

// The lengths of dim `dim` before mesh dimension `mesh_dim` cuts it. The placements before it are in normal form.
Lengths lengths_before(c10::ArrayRef<int64_t> mesh_sizes, PlacementsRef placements, int64_t mesh_dim, int64_t dim,
                       int64_t size) {
  Lengths lengths{size};
  for (int64_t i = 0; i < mesh_dim; ++i) {
    if (placements[i].is_shard(dim)) cut_all(lengths, placements[i], mesh_sizes[i]);
  }
  return lengths;
}

std::string explain(const Misfit& misfit, const Placement& p, c10::IntArrayRef sizes) {
  switch (misfit.kind) {
    case Misfit::dim_range:
      if (sizes.empty()) return fmt::format("got shard dim {} of a single number, which has no dims to cut", p.dim);
      return fmt::format("shard dim {} is out of range for {} dimensions; expected {} to {}", p.dim, sizes.size(),
                         -static_cast<int64_t>(sizes.size()), static_cast<int64_t>(sizes.size()) - 1);
    case Misfit::factors:
      if (p.is_flat()) return fmt::format("got pieces of {} and an offset of {}; expected at least 1 and 0", p.unit, p.offset);
      return fmt::format("got split {} and unit {}; expected both to be at least 1", p.split, p.unit);
    case Misfit::length:
      return fmt::format("split*unit = {} does not divide the length {} of dim {}; hint: choose a split that does",
                         p.split * p.unit, misfit.got, p.dim);
    case Misfit::shares:
      return fmt::format("got {} shares; expected one per rank of the mesh dimension", p.shares->parts().size());
    case Misfit::second_flat: return "another mesh dimension is flat already; hint: flatten the two mesh dimensions into one";
    case Misfit::no_dims: return "a single number has no elements to deal out";
    case Misfit::short_buffer:
      return fmt::format("pieces of {} do not reach {}, where the tensor's elements end; expected larger pieces", p.unit, misfit.got);
    case Misfit::none: break;
  }
  return {};
}

// A flat cut, of what all others leave.
Misfit check_flat(c10::ArrayRef<int64_t> mesh_sizes, const Placements& placements, int64_t mesh_dim, c10::IntArrayRef sizes) {
  const auto& p = placements[mesh_dim];
  if (sizes.empty()) return {Misfit::no_dims, mesh_dim};
  if (p.unit < 1 || p.offset < 0) return {Misfit::factors, mesh_dim};
  for (int64_t i = 0; i < mesh_dim; ++i) {
    if (placements[i].is_flat()) return {Misfit::second_flat, mesh_dim};
  }
  int64_t elements = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const auto lengths = lengths_before(mesh_sizes, placements, static_cast<int64_t>(placements.size()), static_cast<int64_t>(d), sizes[d]);
    elements *= *std::ranges::max_element(lengths);
  }
  const int64_t end = p.offset + elements, needed = (end + mesh_sizes[mesh_dim] - 1) / mesh_sizes[mesh_dim];
  return p.unit < needed ? Misfit{Misfit::short_buffer, mesh_dim, end} : Misfit{};
}

}  // namespace

Misfit normalize(c10::ArrayRef<int64_t> mesh_sizes, Placements& placements, c10::IntArrayRef sizes) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; i < static_cast<int64_t>(placements.size()); ++i) {
    auto& p = placements[i];
    if (!p.is_shard()) {
      p = p.is_partial() ? partial(p.op) : p.is_flat() ? flat(p.unit, p.offset) : replicate();
      continue;
    }
    p.op = ReduceOp::sum;
    if (p.dim < -ndim || p.dim >= ndim) return {Misfit::dim_range, i};
    if (p.dim < 0) p.dim = static_cast<int16_t>(p.dim + ndim);
    if (p.split < 1 || p.unit < 1) return {Misfit::factors, i};
    if (p.cut() == Cut()) continue;
    if (p.shares && static_cast<int64_t>(p.shares->parts().size()) != mesh_sizes[i]) return {Misfit::shares, i};
    const auto lengths = lengths_before(mesh_sizes, placements, i, p.dim, sizes[p.dim]);
    const int64_t block = p.split * p.unit;
    for (int64_t length : lengths) {
      if (length % block != 0) return {Misfit::length, i, length};
    }
    const bool even = lengths.size() == 1 && lengths[0] / block % mesh_sizes[i] == 0;
    if (even && p.shares && p.shares->are_equal()) p.shares = nullptr;
    if (even && !p.shares) p.unit = 1;
  }
  for (int64_t i = 0; i < static_cast<int64_t>(placements.size()); ++i) {
    if (!placements[i].is_flat()) continue;
    if (const auto misfit = check_flat(mesh_sizes, placements, i, sizes); misfit.kind != Misfit::none) return misfit;
  }
  return {};
}

void check_and_normalize(const DeviceMesh& mesh, Placements& placements, c10::IntArrayRef sizes) {
  if (static_cast<int64_t>(placements.size()) != mesh.ndim()) {
    fail("Layout", "got {} placements {}; expected {}, one per dimension of {}", placements.size(), str(placements),
         mesh.ndim(), mesh.str());
  }
  const auto misfit = normalize(mesh.sizes(), placements, sizes);
  if (misfit.kind == Misfit::none) return;
  const int64_t i = misfit.mesh_dim;
  fail("Layout", "{} does not fit a tensor of shape [{}] on mesh dimension \"{}\" of size {}: {}", placements[i].str(),
       fmt::join(sizes, ", "), mesh.names()[i], mesh.sizes()[i], explain(misfit, placements[i], sizes));
}

}  // namespace dtensor::detail
