// A column of a batch: values of its rows, which may lie on some ranks only, be worked out when they are read, and come from a method that
// other ranks still run.
#pragma once

#include <dtensor/mesh/world.hpp>
#include <dtensor/rl/rows.hpp>

#include <nlohmann/json.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <set>

#pragma GCC visibility push(default)

namespace dtensor::rl {

using Objects = std::vector<nlohmann::json>;  // one for each row: texts, numbers, lists

// A cheap handle: copies are the same column, and so are all that read it. Values are not changed once they are in a column.
class Column {
 public:
  // [batch, ...]: a plain tensor that is equal on all ranks, or a DTensor on any mesh, absent on ranks outside of it. Its gradient, if it
  // has one, is left behind. Throws for a tensor without a dim.
  Column(const at::Tensor& values);
  Column(const DTensor& values) : Column(values.tensor()) {}
  // Equal on all ranks.
  Column(Objects values);
  Column(const std::vector<std::string>& values) : Column(Objects(values.begin(), values.end())) {}

  // Rows. Waits for the method that makes the column, where only this tells.
  int64_t size() const;
  // Nothing where that is not known yet.
  std::optional<int64_t> known_size() const { return node_->size; }
  // Where values are: nothing means on every rank.
  const std::optional<DeviceMesh>& mesh() const { return node_->mesh; }
  // The ranks that read it together: those from which it comes, by whatever way, and those on which it is. None: each by itself.
  const std::set<int>& readers() const { return node_->readers; }

  // Work the values out, at the first call. All ranks that have values of the column from which it comes, or get some of this one, call it;
  // others may. Throws where the column holds objects, or a tensor.
  const at::Tensor& tensor() const;
  const Objects& objects() const;  // throws on a rank that has none
  bool is_tensor() const;
  // The same for a column of either kind.
  void read() const { node_->get(); }

  // Chosen rows (see take_rows), when they are read.
  Column rows(Rows rows) const;
  // On other ranks, when it is read: of a tensor each rank gets the rows that it lacks, once; objects come whole to ranks that have none.
  // Those who read it in one layout share it.
  Column on(const RowLayout& layout) const;

  bool is(const Column& other) const { return node_ == other.node_; }

  // -- For what makes columns.
  struct Values {
    at::Tensor tensor{};
    std::shared_ptr<const Objects> objects{};  // null: a tensor; or absent
    int64_t size = 0;
    bool is_tensor() const { return tensor.defined(); }
  };
  using Make = std::function<Values()>;
  Column(Make make, std::optional<int64_t> size, std::optional<DeviceMesh> mesh, std::set<int> readers);

 private:
  struct Node {
    std::optional<int64_t> size;
    std::optional<DeviceMesh> mesh;
    std::set<int> readers;
    Make make;  // empty once it was called
    std::optional<Values> values{};
    std::vector<std::pair<RowLayout, Values>> elsewhere{};  // where it was read

    const Values& get();
    // Who takes part in what is made of it: none where every rank has it.
    std::set<int> takers() const;
  };
  std::shared_ptr<Node> node_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// All ranks of the world, for messages of the host's memory.
inline comm::Communicator& everyone() {
  std::vector<int> ranks(World::current().size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto count = static_cast<int64_t>(ranks.size());
  return DeviceMesh(c10::kCPU, std::move(ranks), {count}, {"everyone"}).communicator(0);
}

// What this rank has sent that may be under way.
struct Outbox {
  std::vector<comm::WorkPtr> works;

  void add(comm::Async sent) {
    std::erase_if(works, [](const comm::WorkPtr& work) { return work->done(); });
    if (sent.work) works.push_back(std::move(sent.work));
  }
};

// Bytes from one rank to another, in the order in which they are sent under a tag. Waits for nobody.
inline void send_bytes(const std::vector<uint8_t>& bytes, int to, int tag) {
  const NoSpmd plain;
  auto& outbox = World::current().local<Outbox>();
  const auto count = static_cast<int64_t>(bytes.size());
  outbox.add(everyone().send(at::tensor({count}, at::kLong), to, tag));
  outbox.add(everyone().send(at::tensor(bytes, at::kByte), to, tag));
}
inline std::vector<uint8_t> receive_bytes(int from, int tag) {
  const NoSpmd plain;
  const auto count = everyone().recv(at::empty({1}, at::kLong), from, tag).get();
  const auto bytes = everyone().recv(at::empty({count.item<int64_t>()}, at::kByte), from, tag).get();
  return {bytes.data_ptr<uint8_t>(), bytes.data_ptr<uint8_t>() + bytes.numel()};
}

inline constexpr int kObjectsTag = 2901, kResultsTag = 2902;

inline bool has_rank(const std::optional<DeviceMesh>& mesh, int rank) { return !mesh || std::ranges::count(mesh->ranks(), rank) > 0; }

// Objects come from the first rank that has them to those that need them.
inline Column::Values objects_on(const Column::Values& from, const std::optional<DeviceMesh>& source, const DeviceMesh& mesh) {
  if (!source || *source == mesh) return from;
  const int own = World::current().rank(), root = source->ranks().front();
  if (own == root) {
    const auto bytes = nlohmann::json::to_cbor(nlohmann::json(*from.objects));
    for (const int rank : mesh.ranks()) {
      if (!has_rank(source, rank)) send_bytes(bytes, rank, kObjectsTag);
    }
  }
  if (!has_rank(mesh, own)) return {.size = from.size};
  if (has_rank(source, own)) return from;
  auto came = nlohmann::json::from_cbor(receive_bytes(root, kObjectsTag)).get<Objects>();
  return {.objects = std::make_shared<const Objects>(std::move(came)), .size = from.size};
}

inline at::Tensor tensor_on(const at::Tensor& x, const RowLayout& layout) {
  const NoSpmd plain;
  const at::NoGradGuard no_grad;
  if (!is_dtensor(x)) return distribute_tensor(x, layout.mesh, layout.placements).tensor();
  const DTensor source(x);
  if (source.mesh() == layout.mesh && source.placements() == PlacementsRef(layout.placements)) return x;
  return redistribute(x, layout.mesh, layout.placements);
}

}  // namespace detail

inline Column::Column(Make make, std::optional<int64_t> size, std::optional<DeviceMesh> mesh, std::set<int> readers)
    : node_(std::make_shared<Node>(Node{size, std::move(mesh), std::move(readers), std::move(make)})) {}

inline Column::Column(const at::Tensor& values) : Column(Make(), {}, {}, {}) {
  require(values.defined() && values.dim() > 0, detail::kBatch, "got {} for a column; expected [batch, ...]", detail::shape_of(values));
  node_->size = values.size(0);
  if (const auto* layout = find_layout(values)) {
    node_->mesh = layout->mesh();
    node_->readers = {layout->mesh().ranks().begin(), layout->mesh().ranks().end()};
  }
  node_->values = Values{.tensor = values.detach(), .size = values.size(0)};
}

inline Column::Column(Objects values) : Column(Make(), static_cast<int64_t>(values.size()), {}, {}) {
  node_->values = Values{.objects = std::make_shared<const Objects>(std::move(values)), .size = *node_->size};
}

inline const Column::Values& Column::Node::get() {
  if (!values) {
    values = make();
    size = values->size;
    make = {};
  }
  return *values;
}

inline std::set<int> Column::Node::takers() const {
  auto takers = readers;
  if (mesh) takers.insert(mesh->ranks().begin(), mesh->ranks().end());
  return takers;
}

inline int64_t Column::size() const { return node_->size ? *node_->size : node_->get().size; }
inline bool Column::is_tensor() const { return node_->get().is_tensor(); }

inline const at::Tensor& Column::tensor() const {
  const auto& values = node_->get();
  require(values.is_tensor(), detail::kBatch, "the column holds objects; expected a tensor; hint: read it by objects() or texts()");
  return values.tensor;
}

inline const Objects& Column::objects() const {
  const auto& values = node_->get();
  if (values.is_tensor()) fail(detail::kBatch, "the column holds a tensor of {}; expected objects", detail::shape_of(values.tensor));
  if (!values.objects) {
    fail(detail::kBatch, "the objects are elsewhere: on {}; hint: batch.on(mesh) brings them to a mesh that has this rank",
         node_->mesh ? node_->mesh->str() : "other ranks");
  }
  return *values.objects;
}

inline Column Column::rows(Rows rows) const {
  const auto count = static_cast<int64_t>(rows.size());
  if (node_->size) detail::check_row_numbers(rows, *node_->size);
  const auto make = [node = node_, rows = std::move(rows), count]() -> Values {
    const auto& from = node->get();
    detail::check_row_numbers(rows, from.size);
    if (from.is_tensor()) return {.tensor = take_rows(from.tensor, rows), .size = count};
    if (!from.objects) return {.size = count};
    Objects chosen;
    for (const auto row : rows) chosen.push_back((*from.objects)[row]);
    return {.objects = std::make_shared<const Objects>(std::move(chosen)), .size = count};
  };
  return Column(make, count, node_->mesh, node_->takers());
}

inline Column Column::on(const RowLayout& layout) const {
  const auto make = [node = node_, layout]() -> Values {
    for (const auto& [where, values] : node->elsewhere) {
      if (where == layout) return values;
    }
    const auto& from = node->get();
    auto moved = from.is_tensor() ? Values{.tensor = detail::tensor_on(from.tensor, layout), .size = from.size}
                                  : detail::objects_on(from, node->mesh, layout.mesh);
    node->elsewhere.emplace_back(layout, moved);
    return moved;
  };
  auto readers = node_->takers();
  if (!readers.empty()) readers.insert(layout.mesh.ranks().begin(), layout.mesh.ranks().end());
  return Column(make, node_->size, layout.mesh, std::move(readers));
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
