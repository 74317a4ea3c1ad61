// The ranks of a pipeline: on which mesh each rank of a schedule is, and what those of all stages tell each other.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/comm/communicator.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/world.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// A rank of a schedule is a mesh of ranks, since stages may be sharded.
class PipelineRanks {
 public:
  // The slices of a mesh along one of its dimensions.
  PipelineRanks(const DeviceMesh& mesh, std::string_view dim);
  // Meshes of any sizes. Every rank of each makes it. Throws as own_mesh().
  explicit PipelineRanks(std::vector<DeviceMesh> meshes);

  int size() const { return static_cast<int>(meshes_.size()); }  // ranks of the schedule
  int own() const { return own_; }                               // the one that this rank is
  const std::vector<DeviceMesh>& meshes() const { return meshes_; }
  const DeviceMesh& all() const { return all_; }  // every rank of these

  // These communicate; every rank calls them. From the schedule's rank `from` to all.
  at::Tensor broadcast(const at::Tensor& tensor, int from) const { return group_->broadcast(tensor, speakers_[from]).get(); }
  // The same of numbers, and no rank gets them before all ranks have called it.
  at::Tensor from(int rank, const at::Tensor& numbers) const {
    return all_reduce(own_ == rank ? numbers : at::zeros_like(numbers), ReduceOp::sum);
  }
  // Of one value from each of the schedule's ranks; what is not negative.
  at::Tensor all_reduce(const at::Tensor& values, ReduceOp op) const {
    return group_->all_reduce(speaks_ ? values : at::zeros_like(values), op).get();
  }
  // The largest of all ranks, also of those with one mesh.
  at::Tensor largest(const at::Tensor& values) const;

 private:
  DeviceMesh all_;                  // of all ranks
  std::vector<DeviceMesh> meshes_;  // of the schedule's ranks
  int own_ = 0;
  comm::Communicator* group_ = nullptr;
  std::vector<int> speakers_;  // for each of the schedule's ranks, a rank of the group
  bool speaks_ = true;         // whether this one is among them
};

// Which of the meshes this rank is in. Throws on a rank that is in none, and where two share a rank.
int own_mesh(const std::vector<DeviceMesh>& meshes);

// -- How -----------------------------------------------------------------------------------------------------------------

inline int own_mesh(const std::vector<DeviceMesh>& meshes) {
  require(!meshes.empty(), "pipeline", "got no mesh; expected one for each rank of the schedule");
  std::set<int> ranks;
  for (const auto& mesh : meshes) {
    for (const int rank : mesh.ranks()) {
      require(ranks.insert(rank).second, "pipeline", "rank {} is in two meshes; {} is the second; expected one", rank, mesh.str());
    }
  }
  const auto own = std::ranges::find_if(meshes, &DeviceMesh::contains_this_rank);
  require(own != meshes.end(), "pipeline", "this rank is in no mesh; the first is {}; expected each rank in one", meshes[0].str());
  return static_cast<int>(own - meshes.begin());
}

namespace detail {

inline DeviceMesh mesh_of_all(const std::vector<DeviceMesh>& meshes) {
  const auto device = meshes[own_mesh(meshes)].device_type();
  std::vector<int> ranks;
  for (const auto& mesh : meshes) ranks.insert(ranks.end(), mesh.ranks().begin(), mesh.ranks().end());
  std::ranges::sort(ranks);
  const auto count = static_cast<int64_t>(ranks.size());
  return DeviceMesh(device, std::move(ranks), {count}, {"pipeline"});
}

}  // namespace detail

inline PipelineRanks::PipelineRanks(const DeviceMesh& mesh, std::string_view name)
    : all_(mesh), own_(static_cast<int>(mesh.coordinate(mesh.dim(name)))), group_(&mesh.communicator(mesh.dim(name))) {
  for (int i = 0; i < group_->size(); ++i) {
    meshes_.push_back(mesh.slice(name, i));
    speakers_.push_back(i);
  }
}

inline PipelineRanks::PipelineRanks(std::vector<DeviceMesh> meshes)
    : all_(detail::mesh_of_all(meshes)), meshes_(std::move(meshes)), own_(own_mesh(meshes_)), group_(&all_.communicator(0)) {
  for (const auto& mesh : meshes_) {
    speakers_.push_back(static_cast<int>(std::ranges::find(all_.ranks(), mesh.ranks().front()) - all_.ranks().begin()));
  }
  speaks_ = group_->rank() == speakers_[own_];
}

inline at::Tensor PipelineRanks::largest(const at::Tensor& values) const {
  std::vector<int64_t> dims(all_.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  return all_.communicator(dims).all_reduce(values, ReduceOp::max).get();
}

namespace detail {

// From the schedule's rank `from`, which alone gives it; undefined if it is so there.
inline at::Tensor broadcast_any(const PipelineRanks& ranks, const at::Tensor& tensor, int from) {
  constexpr int64_t kMostDims = 61;
  auto form = at::zeros({3 + kMostDims}, at::kLong);
  if (ranks.own() == from && tensor.defined()) {
    require(tensor.dim() <= kMostDims, "pipeline", "got a tensor of {} dims; expected {} at most", tensor.dim(), kMostDims);
    form[0] = 1, form[1] = static_cast<int64_t>(tensor.scalar_type()), form[2] = tensor.dim();
    for (int64_t d = 0; d < tensor.dim(); ++d) form[3 + d] = tensor.size(d);
  }
  form = ranks.broadcast(form, from);
  const auto* numbers = form.data_ptr<int64_t>();
  if (numbers[0] == 0) return {};
  const auto options = at::TensorOptions(c10::Device(ranks.meshes()[0].device_type())).dtype(static_cast<c10::ScalarType>(numbers[1]));
  const auto own = ranks.own() == from ? tensor.contiguous() : at::empty({numbers + 3, static_cast<size_t>(numbers[2])}, options);
  return ranks.broadcast(own, from);
}

}  // namespace detail

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
