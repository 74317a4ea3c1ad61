// How the rows of a batch lie on ranks, and rows chosen by number from a tensor whose rows lie on several.
#pragma once

#include <dtensor/collectives/pieces.hpp>
#include <dtensor/rl/inputs.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

using Rows = std::vector<int64_t>;  // numbers of rows

// On which ranks rows are: along each dimension of a mesh they are cut (shard(0)) or repeated (replicate()).
struct RowLayout {
  DeviceMesh mesh;
  Placements placements;

  bool operator==(const RowLayout& other) const { return mesh == other.mesh && placements == other.placements; }
  std::string str() const;
};

// Rows cut over the named dimensions of a mesh. Throws for a name that the mesh lacks.
RowLayout rows_over(const DeviceMesh& mesh, const std::vector<std::string>& dims);
// Over "dp"; on a mesh without such a dimension, every rank has all rows.
RowLayout rows_over(const DeviceMesh& mesh);
// Every rank has all rows.
inline RowLayout whole_rows(const DeviceMesh& mesh) { return rows_over(mesh, {}); }

// Rows of x [batch, ...], which may be repeated and in any order: [rows, ...]. A plain tensor gives a plain one. A DTensor gives one on the
// same mesh, cut along dim 0 as x is, evenly. Then every rank of the mesh calls it with the same numbers: each receives the rows that it
// lacks, once, in one all_to_all along the dimension that cuts rows, and nothing is communicated where no rank lacks any. (Where two
// dimensions cut them, x is gathered along these.) Throws for numbers out of range.
at::Tensor take_rows(const at::Tensor& x, const Rows& rows);

// -- How ------------------------------------------------------------------------------------------------------------------

inline std::string RowLayout::str() const {
  std::string text;
  for (const auto& placement : placements) text += (text.empty() ? "" : ", ") + placement.str();
  return "(" + text + ") on " + mesh.str();
}

inline RowLayout rows_over(const DeviceMesh& mesh, const std::vector<std::string>& dims) {
  Placements placements(mesh.ndim(), replicate());
  for (const auto& name : dims) placements[mesh.dim(name)] = shard(0);
  return {mesh, placements};
}

inline RowLayout rows_over(const DeviceMesh& mesh) {
  const auto& names = mesh.names();
  return rows_over(mesh, std::ranges::find(names, "dp") == names.end() ? std::vector<std::string>{} : std::vector<std::string>{"dp"});
}

namespace detail {

inline constexpr const char* kBatch = "rl::Batch";

inline void check_row_numbers(const Rows& rows, int64_t size) {
  for (const auto row : rows) {
    if (row < 0 || row >= size) fail(kBatch, "row {} of a batch of {} rows; expected 0 to {}", row, size, size - 1);
  }
}

inline at::Tensor index_of(const Rows& rows) {
  const NoSpmd plain;
  return at::tensor(rows, at::kLong);
}

inline bool are_consecutive(const Rows& rows) {
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[0] + static_cast<int64_t>(i)) return false;
  }
  return true;
}

// Consecutive rows are a view.
inline at::Tensor plain_rows(const at::Tensor& x, const Rows& rows) {
  if (!rows.empty() && are_consecutive(rows)) return x.narrow(0, rows[0], static_cast<int64_t>(rows.size()));
  return x.index_select(0, index_of(rows).to(x.device()));
}

// Which place along mesh dimension `dim` has a row, and the row's position there.
struct RowOwners {
  std::vector<int64_t> place, position;

  RowOwners(const Layout& layout, int64_t dim) : place(layout.sizes()[0]), position(layout.sizes()[0]) {
    auto coordinate = layout.mesh().coordinate().vec();
    for (int64_t p = 0; p < layout.mesh().size(dim); ++p) {
      coordinate[dim] = p;
      int64_t next = 0;
      for (const auto& run : layout.intervals(0, coordinate)) {
        for (auto row = run.begin; row < run.end; ++row, ++next) std::tie(place[row], position[row]) = std::pair(p, next);
      }
    }
  }
};

// Rows of this rank's part `local` under `from`, as its part under `to`, where mesh dimension `dim` cuts rows in both.
inline at::Tensor exchange_rows(const at::Tensor& local, const Layout& from, const Layout& to, int64_t dim, const Rows& rows) {
  const RowOwners had(from, dim), has(to, dim);
  const auto own = from.mesh().coordinate(dim), ranks = from.mesh().size(dim), count = static_cast<int64_t>(rows.size());
  std::vector<Rows> sent(ranks), received(ranks);  // positions in the own part, by peer
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    const auto giver = had.place[rows[i]], taker = has.place[i];
    any |= giver != taker;
    if (giver == own) sent[taker].push_back(had.position[rows[i]]);
    if (taker == own) received[giver].push_back(has.position[i]);
  }
  Rows leaving, order;
  Lengths send, receive;
  const auto numel = dtensor::detail::slice_of(local);
  for (int64_t p = 0; p < ranks; ++p) {
    leaving.insert(leaving.end(), sent[p].begin(), sent[p].end());
    order.insert(order.end(), received[p].begin(), received[p].end());
    send.push_back(static_cast<int64_t>(sent[p].size()) * numel);
    receive.push_back(static_cast<int64_t>(received[p].size()) * numel);
  }
  auto rows_sent = local.index_select(0, index_of(leaving).to(local.device()));
  auto sizes = local.sizes().vec();
  sizes[0] = static_cast<int64_t>(order.size());
  if (any) rows_sent = from.mesh().communicator(dim).all_to_all(rows_sent.reshape({-1}), send, receive).get().view(sizes);
  Rows back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[order[i]] = static_cast<int64_t>(i);
  return rows_sent.index_select(0, index_of(back).to(local.device()));
}

// Mesh dimensions of more than one rank that cut dim 0.
inline std::vector<int64_t> dims_that_cut_rows(const Layout& layout) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < layout.mesh().ndim(); ++d) {
    const auto& placement = layout.placements()[d];
    if (placement.is_flat() || (placement.is_shard(0) && layout.mesh().size(d) > 1)) dims.push_back(d);
  }
  return dims;
}

}  // namespace detail

inline at::Tensor take_rows(const at::Tensor& x, const Rows& rows) {
  const NoSpmd plain;
  require(x.defined() && x.dim() >= 1, detail::kBatch, "got {} for a column; expected [batch, ...]", detail::shape_of(x));
  detail::check_row_numbers(rows, x.size(0));
  const auto* layout = find_layout(x);
  if (!layout) return detail::plain_rows(x, rows);
  const auto& mesh = layout->mesh();
  const auto dims = detail::dims_that_cut_rows(*layout);
  Placements placements(layout->placements().begin(), layout->placements().end()), gathered = placements;
  for (const auto dim : dims) {
    placements[dim] = shard(0);
    gathered[dim] = replicate();
  }
  auto sizes = layout->sizes().vec();
  sizes[0] = static_cast<int64_t>(rows.size());
  const bool exchanges = dims.size() == 1 && layout->placements()[dims[0]].is_shard(0) && !layout->has_partial();
  const auto to = Layout::get(mesh, exchanges ? placements : gathered, sizes, layout->dtype());
  if (layout->is_absent()) return from_local(at::empty({0}, at::TensorOptions(layout->dtype())), mesh, placements, sizes).tensor();
  if (exchanges) {
    const auto local = detail::exchange_rows(DTensor(x.detach()).to_local(), *layout, *to, dims[0], rows);
    return from_local(local, mesh, placements, sizes).tensor();
  }
  const auto whole = dims.empty() ? DTensor(x.detach()) : DTensor(x.detach()).redistribute(gathered);
  const auto local = detail::plain_rows(whole.to_local(), rows);
  const auto result = from_local(local, mesh, gathered, sizes);
  return dims.empty() ? result.tensor() : result.redistribute(placements).tensor();
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
