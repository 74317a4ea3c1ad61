// How a batch is cut, ordered, repeated, padded and joined along its rows.
#pragma once

#include <dtensor/rl/batch.hpp>
#include <dtensor/tensor/on.hpp>

#include <ATen/ops/cat.h>

#pragma GCC visibility push(default)

namespace dtensor::rl {

namespace detail {

inline Rows numbers(int64_t begin, int64_t end) {
  Rows rows(std::max<int64_t>(end - begin, 0));
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}

// Where part i of `parts` begins: the first ones have one more where they do not divide.
inline int64_t begin_of(int64_t part, int64_t parts, int64_t size) { return size / parts * part + std::min(part, size % parts); }

// How many ranks have rows of their own.
inline int64_t ranks_of(const RowLayout& layout) {
  int64_t ranks = 1;
  for (int64_t d = 0; d < layout.mesh.ndim(); ++d) ranks *= layout.placements[d].is_shard(0) ? layout.mesh.size(d) : 1;
  return ranks;
}

// In part i the i-th part of each rank's rows, which are cut as shard(0) cuts them.
inline std::vector<Rows> cut_rows(int64_t count, int64_t ranks, int64_t parts) {
  const auto share = (count + ranks - 1) / ranks;
  std::vector<Rows> chosen(parts);
  for (int64_t begin = 0; begin < count; begin += share) {
    const auto own = std::min(share, count - begin);
    for (int64_t i = 0; i < parts; ++i) {
      for (auto row = begin_of(i, parts, own); row < begin_of(i + 1, parts, own); ++row) chosen[i].push_back(begin + row);
    }
  }
  return chosen;
}

// On the mesh of the first that lies on one. Others than plain tensors are joined where that mesh is.
inline at::Tensor joined(const std::vector<at::Tensor>& list) {
  const auto on_mesh = std::ranges::find_if(list, [](const at::Tensor& x) { return is_dtensor(x); });
  if (on_mesh == list.end()) return at::cat(list);
  const DTensor first(*on_mesh);
  const RowLayout layout{first.mesh(), {first.placements().begin(), first.placements().end()}};
  std::vector<at::Tensor> there;
  for (const auto& x : list) there.push_back(tensor_on(x, layout));
  return on(layout.mesh, [&] { return at::cat(there); });
}

// On the mesh of the first that lies on one, whose ranks then have them.
inline Column joined(const std::vector<Column>& list) {
  const auto placed = std::ranges::find_if(list, [](const Column& column) { return column.mesh().has_value(); });
  const auto mesh = placed == list.end() ? std::optional<DeviceMesh>() : placed->mesh();
  const bool is_here = has_rank(mesh, World::current().rank());
  Objects objects;
  int64_t size = 0;
  for (const auto& column : list) {
    const auto there = mesh ? column.on(rows_over(*mesh)) : column;
    there.read();
    size += there.size();
    if (is_here) objects.insert(objects.end(), there.objects().begin(), there.objects().end());
  }
  if (!mesh) return Column(std::move(objects));
  const Column::Values values{.objects = is_here ? std::make_shared<const Objects>(std::move(objects)) : nullptr, .size = size};
  return Column([values] { return values; }, size, mesh, {mesh->ranks().begin(), mesh->ranks().end()});
}

inline Column joined(const std::string& name, const std::vector<Batch>& batches) {
  const bool tensors = batches[0].column(name).is_tensor();
  std::vector<at::Tensor> list;
  std::vector<Column> columns;
  for (const auto& batch : batches) {
    const auto& column = batch.column(name);
    require(column.is_tensor() == tensors, kBatch, "column '{}' holds a tensor in one batch and objects in another", name);
    columns.push_back(column);
    if (!tensors) continue;
    list.push_back(column.tensor());
    const auto &x = list[0], &y = list.back();
    if (x.dim() != y.dim() || x.sizes().slice(1) != y.sizes().slice(1) || x.scalar_type() != y.scalar_type())
      fail(kBatch, "column '{}' is {} of {} in one batch and {} of {} in another; expected equal rows; hint: pad them to one length", name,
           c10::toString(x.scalar_type()), shape_of(x), c10::toString(y.scalar_type()), shape_of(y));
  }
  return tensors ? Column(joined(list)) : joined(columns);
}

}  // namespace detail

inline Batch Batch::rows(Rows rows) const {
  auto result = each([&](const Column& column) { return column.rows(rows); });
  if (!result.layout_) return result;
  for (auto& placement : result.layout_->placements) {
    if (placement.is_shard(0)) placement = shard(0);  // as take_rows() cuts them
  }
  return result;
}

inline Batch Batch::rows(const at::Tensor& mask) const {
  require(mask.defined() && mask.dim() == 1 && mask.scalar_type() == at::kBool && !is_dtensor(mask) && mask.size(0) == size(),
          detail::kBatch, "got {} for a mask; expected a plain bool [{}]", detail::shape_of(mask), size());
  Rows chosen;
  for (int64_t row = 0; row < mask.size(0); ++row) {
    if (mask[row].item<bool>()) chosen.push_back(row);
  }
  return rows(std::move(chosen));
}

inline Batch Batch::slice(int64_t begin, int64_t end) const {
  require(0 <= begin && begin <= end && end <= size(), detail::kBatch, "got rows {} to {} of {}", begin, end, size());
  return rows(detail::numbers(begin, end));
}

inline Batch Batch::reorder(const Rows& order) const {
  auto sorted = order;
  std::ranges::sort(sorted);
  require(sorted == detail::numbers(0, size()), detail::kBatch, "got an order of {} rows; expected each of {} once", order.size(), size());
  return rows(order);
}

inline Batch Batch::repeat(int64_t times, bool interleave) const {
  require(times >= 0, detail::kBatch, "got {} for the times that rows are repeated; expected 0 or more", times);
  Rows all;
  const auto count = size();
  for (int64_t i = 0; i < count * times; ++i) all.push_back(interleave ? i / times : i % count);
  return rows(std::move(all));
}

inline std::vector<Batch> Batch::chunk(int64_t parts) const {
  const auto count = size();
  require(parts >= 1 && parts <= count, detail::kBatch, "got {} parts of {} rows; expected 1 to {}; hint: pad_to_multiple() adds rows",
          parts, count, count);
  std::vector<Batch> chunks;
  for (int64_t i = 0; i < parts; ++i) chunks.push_back(slice(detail::begin_of(i, parts, count), detail::begin_of(i + 1, parts, count)));
  return chunks;
}

inline std::vector<Batch> Batch::split_by_tokens(const std::vector<int64_t>& lengths, int64_t tokens) const {
  require(static_cast<int64_t>(lengths.size()) == size(), detail::kBatch, "got {} lengths of {} rows", lengths.size(), size());
  std::vector<Batch> parts;
  int64_t begin = 0, sum = 0;
  for (int64_t row = 0; row < size(); ++row) {
    require(lengths[row] <= tokens, detail::kBatch, "row {} has {} tokens; expected at most {}, the budget of a part", row, lengths[row],
            tokens);
    if (sum + lengths[row] > tokens) {
      parts.push_back(slice(begin, row));
      begin = row;
      sum = 0;
    }
    sum += lengths[row];
  }
  if (begin < size()) parts.push_back(slice(begin, size()));
  return parts;
}

inline std::vector<Batch> Batch::microbatches(int64_t parts) const {
  require(layout_.has_value(), detail::kBatch,
          "the batch is in no layout, so its rows are not shared out; hint: batch.on(mesh), or chunk()");
  const auto ranks = detail::ranks_of(*layout_), share = (size() + ranks - 1) / ranks;
  require(parts >= 1 && parts <= std::max<int64_t>(share, 1), detail::kBatch, "got {} microbatches of {} rows on a rank", parts, share);
  std::vector<Batch> result;
  for (auto& each : detail::cut_rows(size(), ranks, parts)) result.push_back(rows(std::move(each)));
  return result;
}

inline Padded Batch::pad_to_multiple(int64_t of) const {
  const auto count = size();
  require(of >= 1, detail::kBatch, "got {} to pad to a multiple of; expected 1 or more", of);
  const auto added = (of - count % of) % of;
  if (added == 0) return {*this, 0};
  auto all = detail::numbers(0, count);
  for (int64_t i = 0; i < added; ++i) all.push_back(i % count);
  return {rows(std::move(all)), added};
}

inline Batch Batch::unpad(int64_t added) const { return added == 0 ? *this : slice(0, size() - added); }

inline Batch concat(const std::vector<Batch>& batches) {
  require(!batches.empty(), detail::kBatch, "got no batch to join");
  Batch result;
  for (const auto& batch : batches) {
    if (batch.names() != batches[0].names())
      fail(detail::kBatch, "batches to join have columns {} and {}; expected the same", batches[0].names(), batch.names());
    Batch meta;
    meta.meta() = batch.meta();
    result.merge(meta);
  }
  for (const auto& name : batches[0].names()) result.set(name, detail::joined(name, batches));
  return result;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
