// The batches of a libtorch DataLoader, laid out on a mesh. Includes <torch/data.h>'s loaders, so dtensor.hpp leaves it out.
#pragma once

#include <dtensor/data/feed.hpp>

#include <torch/data/dataloader.h>
#include <torch/data/example.h>

#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#pragma GCC visibility push(default)

namespace torch::data {

template <class Data, class Target>
void visit_parts(dtensor::data::PartVisitor& visit, Example<Data, Target>& example) {
  visit(example.data);
  if constexpr (!std::is_void_v<Target>) visit(example.target);
}

}  // namespace torch::data

namespace dtensor {

namespace data {

// A list of examples that were not stacked.
template <class Data, class Target>
void visit_parts(PartVisitor& visit, std::vector<torch::data::Example<Data, Target>>& list) {
  visit.examples(true);
  detail::visit_list(visit, list);
  visit.examples(false);
}

}  // namespace data

// Which ranks call their loader.
enum class LoadOn {
  automatic,   // first_rank if the loader has workers or a stateful dataset, because the order of their threads may differ; else every_rank
  first_rank,  // the mesh's first rank, which sends each batch to the others; their loaders stand still
  every_rank,  // each rank loads and nothing is sent; the datasets have to give all ranks the same
};

namespace detail {

// The worker threads of a loader, a protected member.
template <class Loader>
struct WorkersOf : Loader {
  static const std::vector<std::thread>& get(const Loader& loader) { return loader.*&WorkersOf::workers_; }
};

template <class Loader>
inline constexpr bool kIsStateful = false;
template <class Dataset>
inline constexpr bool kIsStateful<torch::data::StatefulDataLoader<Dataset>> = true;

template <class Loader>
bool one_loads(const Loader& loader, LoadOn where) {
  return where == LoadOn::first_rank || (where == LoadOn::automatic && (kIsStateful<Loader> || loader.options().workers > 0));
}

// One pass over the loader; holds the current batch.
template <class Loader>
class BatchPass {
 public:
  using Batch = typename Loader::BatchType;

  BatchPass(Loader& loader, const DeviceMesh& mesh, const Placements& placements, LoadOn where)
      : loader_(loader), mesh_(mesh), placements_(placements), feed_(mesh, one_loads(loader, where), WorkersOf<Loader>::get(loader)) {}

  void next() {
    batch_.reset();
    if (!feed_.next([this] { return load(); }, [this](data::PartVisitor& visit) { show(visit); })) return batch_.reset();
    data::LayOut lay_out(mesh_, placements_);
    lay_out(*batch_);
    lay_out.finish();
  }

  std::optional<Batch>& batch() { return batch_; }

 private:
  bool load() {
    if (at_) {
      ++*at_;
    } else {
      at_.emplace(loader_.begin());
    }
    if (*at_ == loader_.end()) return false;
    batch_ = std::move(**at_);
    return true;
  }

  void show(data::PartVisitor& visit) {
    static_assert(data::detail::kCanBeMade<Batch>, "dt::batches makes this batch on ranks that receive it: give it a default constructor");
    if constexpr (data::detail::kCanBeMade<Batch>) {
      if (!batch_) batch_.emplace();
      visit(*batch_);
    }
  }

  Loader& loader_;
  DeviceMesh mesh_;
  Placements placements_;
  data::Feed feed_;
  std::optional<torch::data::Iterator<Batch>> at_;  // on ranks that load
  std::optional<Batch> batch_;
};

}  // namespace detail

// The range that dt::batches returns. It is an input range, and begin() begins a pass over the loader. Every rank of the mesh has to loop
// over it in the same way.
template <class Loader>
class Batches {
 public:
  using Batch = typename Loader::BatchType;

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using difference_type = std::ptrdiff_t;
    using value_type = Batch;
    using pointer = Batch*;
    using reference = Batch&;

    explicit Iterator(std::shared_ptr<detail::BatchPass<Loader>> pass) : pass_(std::move(pass)) { pass_->next(); }
    Batch& operator*() const { return *pass_->batch(); }
    Batch* operator->() const { return &*pass_->batch(); }
    Iterator& operator++() {
      pass_->next();
      return *this;
    }
    void operator++(int) { pass_->next(); }
    friend bool operator==(const Iterator& it, std::default_sentinel_t) { return !it.pass_->batch(); }

   private:
    std::shared_ptr<detail::BatchPass<Loader>> pass_;
  };

  Batches(Loader& loader, const DeviceMesh& mesh, PlacementsRef placements, LoadOn where)
      : loader_(loader), mesh_(mesh), placements_(placements.begin(), placements.end()), where_(where) {}

  Iterator begin() { return Iterator(std::make_shared<detail::BatchPass<Loader>>(loader_, mesh_, placements_, where_)); }
  std::default_sentinel_t end() const { return {}; }

 private:
  Loader& loader_;
  DeviceMesh mesh_;
  Placements placements_;
  LoadOn where_;
};

// The batches of `loader`, their tensors as DTensors that have the sizes of the whole batch:
//
//   for (auto& batch : dt::batches(*loader, mesh, {dt::shard(0)})) loss(model->forward(batch.data), batch.target).backward();
//
// `loader` is any DataLoader of libtorch (stateless, stateful, chunks). Every rank makes it, from one dataset. It is called outside of
// Spmd, so datasets, transforms and samplers are plain code.
//
// `placements` are those of the batch, one per mesh dimension. A tensor that does not have the dim of a Shard is replicated there. For
// examples that were not stacked, dim 0 is their list, which is not sharded, and dim 1 is dim 0 of an example.
//
// Batches may be tensors, Examples, vectors, arrays, pairs, tuples and optionals of these, numbers and texts, and whatever has a
// visit_parts (data/parts.hpp).
//
// Every rank gets the same batches. The random numbers are those of the plain program, wherever these do not depend on timing: samplers
// draw from the rank's generator, and so do datasets without workers; workers go on from where that generator stands when the pass begins
// (docs/data.md).
//
// Communicates what `where` says. Throws on all ranks what the loader throws, and when a placement shards no tensor of a batch.
template <class Loader>
Batches<Loader> batches(Loader& loader, const DeviceMesh& mesh, PlacementsRef placements, LoadOn where = LoadOn::automatic) {
  return {loader, mesh, placements, where};
}

template <class Loader>
Batches<Loader> batches(Loader& loader, const DeviceMesh& mesh, std::initializer_list<Placement> placements,
                        LoadOn where = LoadOn::automatic) {
  return {loader, mesh, PlacementsRef(placements), where};
}

}  // namespace dtensor

#pragma GCC visibility pop
