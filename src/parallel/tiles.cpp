#include "src/parallel/tiles.hpp"

#include <dtensor/dispatch/flat_group.hpp>

#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/cat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <functional>
#include <optional>

namespace dtensor {

namespace {

// As at::autocast::is_enabled asks, whose name later versions change.
bool is_autocast_on() {
  using c10::DispatchKey;
  const auto is_on = [](DispatchKey key) { return !c10::impl::tls_is_dispatch_key_excluded(key); };
  return is_on(DispatchKey::AutocastCPU) || is_on(DispatchKey::AutocastCUDA);
}

bool cuts_evenly(const Placement& placement, int64_t length, int64_t ranks) {
  return placement.shares == nullptr && length % (placement.cut().block() * ranks) == 0;
}

// The only mesh dimension that cuts a weight, flat buffers apart.
std::optional<int64_t> only_cut(const Layout& layout) {
  std::optional<int64_t> found;
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    const auto& placement = layout.placements()[m];
    if (placement.is_replicate() || placement.is_flat()) continue;
    if (found) return {};
    found = m;
  }
  return found;
}

// That of all the weights, which it cuts alike at `weight_dim`, and evenly.
std::optional<int64_t> dimension_that_cuts(const std::vector<LinearLayer>& layers, int64_t weight_dim) {
  const auto layout_of = [](const LinearLayer& layer) -> const Layout& { return *find_layout(layer.weight); };
  const auto& first = layout_of(layers[0]);
  const auto dim = only_cut(first);
  if (!dim || first.mesh().size(*dim) < 2 || !first.placements()[*dim].is_shard(weight_dim)) return {};
  const auto cut = first.placements()[*dim];
  const bool alike = std::ranges::all_of(layers, [&](const LinearLayer& layer) {
    const auto& layout = layout_of(layer);
    return only_cut(layout) == dim && layout.placements()[*dim] == cut &&
           cuts_evenly(cut, layout.sizes()[weight_dim], layout.mesh().size(*dim));
  });
  return alike ? dim : std::nullopt;
}

bool are_pinned_on_one_mesh(const at::Tensor& rows, const std::vector<LinearLayer>& layers) {
  const auto* layout = find_layout(rows);
  return layout && std::ranges::all_of(layers, [&](const LinearLayer& layer) {
    const auto* weight = find_layout(layer.weight);
    const bool bias_too = layer.bias.defined() == layers[0].bias.defined() && (!layer.bias.defined() || is_dtensor(layer.bias));
    return weight && bias_too && is_pinned(layer.weight) && weight->mesh() == layout->mesh() && weight->ndim() == 2 &&
           layer.weight.scalar_type() == rows.scalar_type();
  });
}

// Whether mesh dimensions cut whole rows, each dim of the tensor evenly, and `dim` one that no other cuts.
bool has_even_rows(const Layout& layout, int64_t dim) {
  std::vector<int64_t> parts(layout.ndim(), 1);
  const auto placements = layout.placements();
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    const auto& placement = placements[m];
    if (placement.is_replicate()) continue;
    if (!placement.is_shard() || placement != shard(placement.dim) || placement.dim >= layout.ndim() - 1) return false;
    parts[placement.dim] *= layout.mesh().size(m);
    if (m != dim && placements[dim].is_shard(placement.dim)) return false;
  }
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    if (layout.sizes()[d] % parts[d] != 0) return false;
  }
  return true;
}

int64_t product(c10::IntArrayRef lengths) { return c10::multiply_integers(lengths); }

at::Tensor as_placed(const at::Tensor& tensor, const Placements& placements) {
  return DTensor(tensor).placements() == PlacementsRef(placements) ? tensor : redistribute(tensor, placements);
}

at::Tensor joined(const std::vector<at::Tensor>& tiles) {
  std::vector<at::Tensor> parts;
  for (const auto& tile : tiles) parts.push_back(local_shard(tile));
  return at::cat(parts, 1);
}

}  // namespace

TilesPtr Tiles::of_columns(const at::Tensor& x, const std::vector<LinearLayer>& layers, int64_t pieces) {
  return make(x, layers, 0, pieces);
}

TilesPtr Tiles::of_rows(const at::Tensor& x, const LinearLayer& layer, const at::Tensor& like, int64_t pieces) {
  const auto tiles = make(like, {layer}, 1, pieces);
  if (!tiles) return {};
  const auto* layout = find_layout(x);
  const bool fits = layout && layout->placements() == PlacementsRef(tiles->by_width_) && x.dim() == like.dim() &&
                    x.sizes().slice(0, x.dim() - 1) == like.sizes().slice(0, x.dim() - 1) && x.scalar_type() == like.scalar_type() &&
                    x.size(-1) == layer.weight.size(1);
  return fits ? tiles : TilesPtr();
}

TilesPtr Tiles::make(const at::Tensor& rows, const std::vector<LinearLayer>& layers, int64_t weight_dim, int64_t pieces) {
  if (pieces < 2 || is_autocast_on()) return {};
  if (!are_pinned_on_one_mesh(rows, layers) || rows.dim() < 2) return {};
  const auto dim = dimension_that_cuts(layers, weight_dim);
  if (!dim || !has_even_rows(*find_layout(rows), *dim)) return {};
  for (const auto& layer : layers) {
    if (weight_dim == 0 && layer.weight.size(1) != rows.size(-1)) return {};
  }
  const auto cut = find_layout(layers[0].weight)->placements()[*dim].cut();
  if (weight_dim == 1 && cut != Cut()) return {};
  const auto tiles = c10::make_intrusive<Tiles>(rows, *dim, shard(rows.dim() - 1, cut), pieces);
  return tiles->before_ * tiles->length_ * tiles->after_ >= pieces ? tiles : TilesPtr();
}

Tiles::Tiles(const at::Tensor& rows, int64_t dim, const Placement& across, int64_t pieces)
    : mesh_(DTensor(rows).mesh()), dim_(dim), pieces_(pieces) {
  const auto& layout = DTensor(rows).layout();
  by_rows_.assign(layout.placements().begin(), layout.placements().end());
  by_width_ = by_rows_;
  by_width_[dim] = across;
  for (int64_t m = 0; m < mesh_.ndim(); ++m) {
    const bool others = m != dim && by_rows_[m].is_shard();
    of_tile_.push_back(others ? shard(1) : replicate());
    if (others) row_cuts_ *= mesh_.size(m);
  }
  const auto ndim = layout.ndim();
  const auto leading = [&](c10::IntArrayRef sizes) { return sizes.slice(0, ndim - 1).vec(); };
  const auto local = layout.local_sizes();
  leading_ = leading(layout.sizes());
  leading_by_rows_ = leading_by_width_ = leading(local);
  length_ = product(leading_by_rows_);
  if (!by_rows_[dim].is_shard()) return;
  const auto cut = by_rows_[dim].dim;
  ranks_ = mesh_.size(dim);
  leading_by_width_[cut] *= ranks_;
  const c10::IntArrayRef lengths(leading_by_rows_);
  before_ = product(lengths.slice(0, cut)), length_ = lengths[cut], after_ = product(lengths.slice(cut + 1));
}

Placements Tiles::along(const Placement& placement) const {
  auto placements = of_tile_;
  placements[dim_] = placement;
  return placements;
}

std::vector<int64_t> Tiles::with_width(c10::IntArrayRef leading, int64_t width) const {
  auto sizes = leading.vec();
  sizes.push_back(width);
  return sizes;
}

// Of a part [this rank's, rows, width's]; `width` is that of the whole.
at::Tensor Tiles::tile(const at::Tensor& part, int64_t piece, const Placement& placement, int64_t width) const {
  const auto rows = part.size(1), begin = rows * piece / pieces_, count = rows * (piece + 1) / pieces_ - begin;
  return from_local(part.narrow(1, begin, count), mesh_, along(placement), {ranks_, count * row_cuts_, width}).tensor();
}

std::vector<at::Tensor> Tiles::gather(const at::Tensor& tensor) const {
  const auto placed = as_placed(tensor, by_rows_);
  const auto width = tensor.size(-1);
  const auto part = local_shard(placed).reshape({1, before_ * length_ * after_, width});
  std::vector<at::Tensor> tiles;
  for (int64_t piece = 0; piece < pieces_; ++piece) {
    const auto cut = tile(part, piece, ranks_ > 1 ? shard(0) : replicate(), width);
    tiles.push_back(ranks_ > 1 ? redistribute(cut, along(replicate())) : cut);
  }
  return tiles;
}

at::Tensor Tiles::reduce(const at::Tensor& tile) const { return redistribute(tile, along(ranks_ > 1 ? shard(0) : replicate())); }

at::Tensor Tiles::join(const std::vector<at::Tensor>& tiles) const {
  const auto width = tiles[0].size(-1);
  return from_local(joined(tiles).reshape(with_width(leading_by_rows_, width)), mesh_, by_rows_, with_width(leading_, width)).tensor();
}

at::Tensor Tiles::across(const at::Tensor& tensor) const {
  const auto part = local_shard(as_placed(tensor, by_width_));
  const auto width = part.size(-1), rows = before_ * length_ * after_;
  return part.reshape({before_, ranks_, length_ * after_, width}).transpose(0, 1).reshape({ranks_, rows, width});
}

at::Tensor Tiles::tile_across(const at::Tensor& part, int64_t piece) const {
  return tile(part, piece, cut(2), part.size(-1) * mesh_.size(dim_));
}

at::Tensor Tiles::join_across(const std::vector<at::Tensor>& tiles) const {
  const auto width = tiles[0].size(-1), local = local_shard(tiles[0]).size(-1);
  const auto part =
      joined(tiles).reshape({ranks_, before_, length_ * after_, local}).transpose(0, 1).reshape(with_width(leading_by_width_, local));
  return from_local(part, mesh_, by_width_, with_width(leading_, width)).tensor();
}

at::Tensor Tiles::summed(const at::Tensor& part, const at::Tensor& parameter, const Placement& placement) const {
  if (!part.defined()) return part;
  Placements placements;
  for (const auto& of_tile : of_tile_) placements.push_back(of_tile.is_shard() ? partial() : replicate());
  placements[dim_] = placement;
  return from_local(part, mesh_, placements, parameter.sizes()).tensor();
}

}  // namespace dtensor
