// What dt::batches does that does not depend on the type of the loader: who loads, what the others get, and what workers draw from.
#pragma once

#include <dtensor/data/parts.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace dtensor::data {

// One pass over a data loader, on every rank of a mesh.
class Feed {
 public:
  // With `one_loads` the mesh's first rank asks its loader, and sends what it gets to the others; else every rank asks its own. The workers
  // are those of this rank's loader, which draw their random numbers from a stream of the pass.
  Feed(const DeviceMesh& mesh, bool one_loads, const std::vector<std::thread>& workers);
  ~Feed();
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;

  // Outside of Spmd: `load` asks the loader and is false when there is no more; `visit` shows the parts of the batch, which is a new one
  // where nothing was loaded. False when there is no more. What `load` throws is thrown there, and on the other ranks an Error that names
  // the rank and says the text. Communicates, with `one_loads`, the batch and, where the loader has drawn from it, the rank's generator.
  bool next(const std::function<bool()>& load, const std::function<void(PartVisitor&)>& visit);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Makes a DTensor of every tensor it is shown, on the mesh and its devices. A Shard of a dim that a tensor does not have replicates it.
class LayOut final : public PartVisitor {
 public:
  LayOut(const DeviceMesh& mesh, PlacementsRef placements);
  void tensor(at::Tensor& tensor) override;
  void bytes(void*, size_t) override {}
  void examples(bool begin) override { examples_ += begin ? 1 : -1; }

  // Throws when a placement cut none of the tensors.
  void finish() const;

 private:
  const DeviceMesh& mesh_;
  PlacementsRef placements_;
  int examples_ = 0, tensors_ = 0;
  std::vector<bool> cuts_;  // by mesh dimension
};

}  // namespace dtensor::data
