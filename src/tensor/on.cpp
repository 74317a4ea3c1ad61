#include <dtensor/tensor/on.hpp>

#include "src/mesh/stand_in.hpp"
#include "src/tensor/mesh_region.hpp"

#include <dtensor/mesh/two_meshes.hpp>

#include <optional>

namespace dtensor::detail {

struct OnMesh::Regions {
  explicit Regions(const DeviceMesh& mesh) : spmd(begin_spmd(mesh)) {
    if (!mesh.contains_this_rank()) stand_in.emplace();
  }
  ~Regions() { spmd->end(); }

  std::shared_ptr<Region> spmd;
  std::optional<StandIn> stand_in;
};

OnMesh::OnMesh(const DeviceMesh& mesh) {
  check_maker("on", mesh);
  regions_ = std::make_unique<Regions>(mesh);
}

OnMesh::~OnMesh() = default;

}  // namespace dtensor::detail
