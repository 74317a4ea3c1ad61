// How a batch keeps, finds, moves and joins its columns.
#pragma once

#include <dtensor/rl/batch.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

namespace detail {

inline bool are_equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  return a.is_floating_point() ? at::allclose(a, b, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true) : a.equal(b);
}

// Decided alike on all ranks: what lies on a mesh is not looked into.
inline bool are_equal(const Column& a, const Column& b) {
  if (a.is(b)) return true;
  if (a.mesh() || b.mesh() || a.is_tensor() != b.is_tensor()) return false;
  return a.is_tensor() ? are_equal(a.tensor(), b.tensor()) : a.objects() == b.objects();
}

}  // namespace detail

inline Batch::Batch(std::initializer_list<std::pair<std::string, Column>> columns) {
  for (const auto& [name, column] : columns) set(name, column);
}

inline int64_t Batch::size() const {
  for (const auto& [name, column] : columns_) {
    if (column.known_size()) return *column.known_size();
  }
  return columns_.empty() ? 0 : columns_.begin()->second.size();
}

inline std::vector<std::string> Batch::names() const {
  std::vector<std::string> names;
  for (const auto& [name, column] : columns_) names.push_back(name);
  return names;
}

inline const Column& Batch::column(const std::string& name) const {
  const auto found = columns_.find(name);
  if (found == columns_.end()) fail(detail::kBatch, "there is no column '{}'; got {}", name, names());
  return found->second;
}

inline void Batch::set(const std::string& name, Column column) {
  for (const auto& [other, known] : columns_) {
    if (other == name || !known.known_size() || !column.known_size()) continue;
    require(*known.known_size() == *column.known_size(), detail::kBatch, "column '{}' has {} rows; expected {}, as '{}' has", name,
            *column.known_size(), *known.known_size(), other);
  }
  columns_.insert_or_assign(name, std::move(column));
}

inline std::vector<std::string> Batch::texts(const std::string& name) const {
  std::vector<std::string> texts;
  for (const auto& object : objects(name)) {
    require(object.is_string(), detail::kBatch, "column '{}' has {} in row {}; expected texts", name, object.type_name(), texts.size());
    texts.push_back(object.get<std::string>());
  }
  return texts;
}

inline Batch Batch::without_columns() const {
  Batch result;
  result.meta_ = meta_;
  result.meta_later_ = meta_later_;
  result.layout_ = layout_;
  return result;
}

template <class F>
Batch Batch::each(F f) const {
  auto result = without_columns();
  for (const auto& [name, column] : columns_) result.columns_.emplace(name, f(column));
  return result;
}

inline Batch Batch::on(const RowLayout& layout) const {
  auto result = each([&](const Column& column) { return column.on(layout); });
  result.layout_ = layout;
  return result;
}

inline Batch Batch::select(const std::vector<std::string>& names) const {
  auto result = without_columns();
  for (const auto& name : names) result.columns_.emplace(name, column(name));
  return result;
}

inline Batch Batch::pop(const std::vector<std::string>& names) {
  auto taken = select(names);
  for (const auto& name : names) columns_.erase(name);
  return taken;
}

inline Batch Batch::rename(const std::map<std::string, std::string>& names) const {
  for (const auto& [old, name] : names) column(old);
  auto result = without_columns();
  for (const auto& [old, column] : columns_) {
    const auto found = names.find(old);
    const auto& name = found == names.end() ? old : found->second;
    require(result.columns_.emplace(name, column).second, detail::kBatch, "two columns would be called '{}'; got {}", name, names);
  }
  return result;
}

inline void Batch::take_meta(const nlohmann::json& meta) const {
  for (const auto& [name, value] : meta.items()) {
    const auto found = meta_.find(name);
    if (found != meta_.end() && *found != value)
      fail(detail::kBatch, "both batches have a meta value '{}': {} and {}; hint: erase one of them", name, found->dump(), value.dump());
    meta_[name] = value;
  }
}

inline const nlohmann::json& Batch::meta() const {
  while (!meta_later_.empty()) {
    const auto later = std::move(meta_later_.front());
    meta_later_.erase(meta_later_.begin());
    take_meta(later());
  }
  return meta_;
}

inline const RowLayout& Batch::layout() const {
  require(layout_.has_value(), detail::kBatch, "the batch is in no layout, so its rows are not shared out; hint: batch.on(mesh)");
  return *layout_;
}

inline Interval Batch::own_rows() const {
  const auto& [mesh, placements] = this->layout();
  const auto rows = Layout::get(mesh, placements, {size()}, at::kLong);
  const auto runs = rows->intervals(0, mesh.coordinate());
  return runs.empty() ? Interval{0, 0} : runs[0];
}

inline Batch& Batch::merge(const Batch& other) {
  auto merged = *this;
  for (const auto& [name, column] : other.columns_) {
    const auto found = columns_.find(name);
    if (found == columns_.end()) {
      merged.set(name, column);
    } else if (!detail::are_equal(found->second, column)) {
      fail(detail::kBatch, "both batches have a column '{}', and they differ{}; hint: rename or pop one of them", name,
           found->second.mesh() || column.mesh() ? " (two columns on meshes are not compared)" : "");
    }
  }
  merged.take_meta(other.meta_);
  merged.meta_later_.insert(merged.meta_later_.end(), other.meta_later_.begin(), other.meta_later_.end());
  return *this = std::move(merged);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
