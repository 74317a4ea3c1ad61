// The part of dt::batches that does not depend on the type of the loader: which rank loads, what the others get, and what workers draw
// from.
#pragma once

#include <dtensor/data/parts.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::data {

// One pass over a data loader, on every rank of a mesh.
class Feed {
 public:
  // With `one_loads` the mesh's first rank calls its loader and sends each batch to the others; else every rank calls its own. `workers`
  // are those of this rank's loader. They draw their random numbers from a stream of the pass.
  Feed(const DeviceMesh& mesh, bool one_loads, const std::vector<std::thread>& workers);
  ~Feed();
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;

  // Gets the next batch. Returns false when there is none. Calls both functions outside of Spmd: `load` calls the loader, and returns false
  // when there are no more batches; `visit` visits the values of the batch, which is a new, empty one on ranks that do not load.
  //
  // What `load` throws is thrown on that rank; the other ranks throw an Error with its rank and text. With `one_loads`, communicates the
  // batch and, if the loader has drawn from it, the rank's generator.
  bool next(const std::function<bool()>& load, const std::function<void(PartVisitor&)>& visit);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Makes a DTensor of every tensor that it visits, on the mesh and its devices. A Shard of a dim that a tensor does not have replicates the
// tensor.
class LayOut final : public PartVisitor {
 public:
  LayOut(const DeviceMesh& mesh, PlacementsRef placements);
  void tensor(at::Tensor& tensor) override;
  void bytes(void*, size_t) override {}
  void examples(bool begin) override { examples_ += begin ? 1 : -1; }

  // Throws when a placement sharded none of the tensors.
  void finish() const;

 private:
  const DeviceMesh& mesh_;
  PlacementsRef placements_;
  int examples_ = 0, tensors_ = 0;
  std::vector<bool> cuts_;  // by mesh dimension
};

}  // namespace dtensor::data

#pragma GCC visibility pop
