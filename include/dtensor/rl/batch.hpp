// A batch: named columns of one number of rows. Its columns move between models by themselves, when they are read.
//
//   rl::Batch batch{{"ids", ids}, {"truths", texts}};               // the same on every rank
//   auto mine = batch.on(mesh);                                     // nothing has moved
//   auto x = mine.get("ids");                                       // now one column has: a DTensor on `mesh`, its rows cut over "dp"
#pragma once

#include <dtensor/rl/column.hpp>

#include <ATen/ops/allclose.h>
#include <fmt/ranges.h>

#include <initializer_list>
#include <map>

#pragma GCC visibility push(default)

namespace dtensor::rl {

class Batch;

struct Padded;

// Cheap to copy; columns are shared. Functions do not change the batch that they are called on, but for set, pop and merge. Every rank
// makes the same calls, and communicates only where it has, or gets, rows of a column that is read.
class Batch {
 public:
  Batch() = default;
  Batch(std::initializer_list<std::pair<std::string, Column>> columns);

  int64_t size() const;  // rows; 0 without columns
  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return columns_.count(name) > 0; }
  // Throws for another number of rows. Replaces a column of that name.
  void set(const std::string& name, Column column);

  // A tensor column where it lies; each throws, with the names that there are, for a name that the batch lacks.
  const at::Tensor& get(const std::string& name) const { return column(name).tensor(); }
  // On the consumer's mesh, its rows cut over "dp": the same as on(mesh).get(name). All ranks that have rows of it and all of `mesh` call
  // it.
  at::Tensor get(const std::string& name, const DeviceMesh& mesh) const { return column(name).on(rows_over(mesh)).tensor(); }
  const Objects& objects(const std::string& name) const { return column(name).objects(); }
  std::vector<std::string> texts(const std::string& name) const;
  const Column& column(const std::string& name) const;

  // The same columns in another layout, which move when they are read. Two readers in one layout move a column once.
  Batch on(const RowLayout& layout) const;
  Batch on(const DeviceMesh& mesh) const { return on(rows_over(mesh)); }

  // Of a batch in a layout (see on()), which throw otherwise: the layout, and the rows that this rank has (on its mesh).
  const RowLayout& layout() const;
  Interval own_rows() const;

  // What is said of the batch as a whole: an object. Waits for methods that say more.
  const nlohmann::json& meta() const;
  nlohmann::json& meta() { return const_cast<nlohmann::json&>(std::as_const(*this).meta()); }
  using MetaLater = std::function<nlohmann::json()>;
  void add_meta(MetaLater later) { meta_later_.push_back(std::move(later)); }

  // -- Columns.
  Batch select(const std::vector<std::string>& names) const;
  Batch pop(const std::vector<std::string>& names);                     // takes them out
  Batch rename(const std::map<std::string, std::string>& names) const;  // old name: new name
  // Adds the columns and meta values of another batch of as many rows. A name that both have must be the same column, or an equal one that
  // every rank has; otherwise throws, and nothing is added.
  Batch& merge(const Batch& other);

  // -- Rows. They are taken when they are read (see take_rows).
  Batch rows(Rows rows) const;               // by number, in any order, also repeatedly
  Batch rows(const at::Tensor& mask) const;  // bool [batch], equal on all ranks
  Batch slice(int64_t begin, int64_t end) const;
  Batch reorder(const Rows& order) const;                     // throws unless `order` is a permutation
  Batch repeat(int64_t times, bool interleave = true) const;  // a a b b, or a b a b
  // As many parts, in order, of sizes that differ by one at most: no row is dropped. Throws for more parts than rows.
  std::vector<Batch> chunk(int64_t parts) const;
  // Consecutive rows together while their `lengths` add up to at most `tokens`. Throws for a row that is longer.
  std::vector<Batch> split_by_tokens(const std::vector<int64_t>& lengths, int64_t tokens) const;
  // Of a batch in a layout (see on()): part i has the i-th part of each rank's rows, which stay where they are if all ranks have as many.
  std::vector<Batch> microbatches(int64_t parts) const;
  // With rows from the head again, up to a multiple; and without them.
  Padded pad_to_multiple(int64_t of) const;
  Batch unpad(int64_t added) const;

 private:
  template <class F>
  Batch each(F f) const;
  Batch without_columns() const;

  void take_meta(const nlohmann::json& meta) const;

  std::map<std::string, Column> columns_;
  mutable nlohmann::json meta_ = nlohmann::json::object();
  mutable std::vector<MetaLater> meta_later_;
  std::optional<RowLayout> layout_;
};

struct Padded {
  Batch batch;
  int64_t added = 0;  // rows at the end
};

// The rows of batches that have the same columns, one batch after the other. Reads the columns. What lies on meshes is joined on the first
// one's. Throws for other names, sizes of a row, and no batch.
Batch concat(const std::vector<Batch>& batches);

}  // namespace dtensor::rl

#include <dtensor/rl/batch_columns.hpp>
#include <dtensor/rl/batch_rows.hpp>

#pragma GCC visibility pop
