// The ranks of a pipeline: on which mesh each rank of a schedule is, and what those of all stages tell each other.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/comm/communicator.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/world.hpp>

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// A rank of a schedule is a mesh of ranks, since stages may be sharded.
class PipelineRanks {
 public:
  // The slices of a mesh along one of its dimensions.
  PipelineRanks(const DeviceMesh& mesh, std::string_view dim);
  // Meshes of any sizes. Every rank of each makes it. Throws on a rank that is in none of them, and where two share a rank.
  explicit PipelineRanks(std::vector<DeviceMesh> meshes);

  int size() const { return static_cast<int>(meshes_.size()); }  // ranks of the schedule
  int own() const { return own_; }                               // the one that this rank is
  const std::vector<DeviceMesh>& meshes() const { return meshes_; }

  // These communicate; every rank calls them. From the schedule's rank `from` to all.
  at::Tensor broadcast(const at::Tensor& tensor, int from) const { return group_->broadcast(tensor, speakers_[from]).get(); }
  // Of one value from each of the schedule's ranks; what is not negative.
  at::Tensor all_reduce(const at::Tensor& values, ReduceOp op) const {
    return group_->all_reduce(speaks_ ? values : at::zeros_like(values), op).get();
  }
  // The largest of all ranks, also of those with one mesh.
  at::Tensor largest(const at::Tensor& values) const { return everyone_->all_reduce(values, ReduceOp::max).get(); }

 private:
  std::vector<DeviceMesh> meshes_;  // of the schedule's ranks
  int own_ = 0;
  comm::Communicator *group_ = nullptr, *everyone_ = nullptr;
  std::vector<int> speakers_;  // for each of the schedule's ranks, a rank of the group
  bool speaks_ = true;         // whether this one is among them
};

// -- How -----------------------------------------------------------------------------------------------------------------

inline PipelineRanks::PipelineRanks(const DeviceMesh& mesh, std::string_view name) {
  const auto dim = mesh.dim(name);
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < mesh.ndim(); ++d) dims.push_back(d);
  for (int i = 0; i < static_cast<int>(mesh.size(dim)); ++i) {
    meshes_.push_back(mesh.slice(name, i));
    speakers_.push_back(i);
  }
  own_ = static_cast<int>(mesh.coordinate(dim));
  group_ = &mesh.communicator(dim);
  everyone_ = &mesh.communicator(dims);
}

inline PipelineRanks::PipelineRanks(std::vector<DeviceMesh> meshes) : meshes_(std::move(meshes)) {
  require(!meshes_.empty(), "pipeline", "got no mesh; expected one for each rank of the schedule");
  std::vector<int> ranks;
  own_ = size();
  for (int i = 0; i < size(); ++i) {
    if (meshes_[i].contains_this_rank()) own_ = std::min(own_, i);
    for (const int rank : meshes_[i].ranks()) {
      require(std::ranges::find(ranks, rank) == ranks.end(), "pipeline", "rank {} is in two meshes; {} is the second; expected one", rank,
              meshes_[i].str());
      ranks.push_back(rank);
    }
  }
  require(own_ < size(), "pipeline", "this rank is in no mesh; the first is {}; expected each rank in one", meshes_[0].str());
  std::ranges::sort(ranks);
  const auto position = [&](int rank) { return static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin()); };
  for (const auto& mesh : meshes_) speakers_.push_back(position(mesh.ranks().front()));
  const auto count = static_cast<int64_t>(ranks.size());
  group_ = everyone_ = &DeviceMesh(meshes_[own_].device_type(), ranks, {count}, {"pipeline"}).communicator(0);
  speaks_ = group_->rank() == speakers_[own_];
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
