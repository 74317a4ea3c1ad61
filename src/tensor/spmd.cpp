#include <dtensor/tensor/spmd.hpp>

#include "src/base/regions.hpp"
#include "src/dispatch/region.hpp"
#include "src/dispatch/replicated.hpp"
#include "src/tensor/mesh_region.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dtensor {

namespace {

struct MeshSetting {
  const DeviceMesh* mesh;
  bool include;  // our key in every call

  static MeshSetting now() { return {dispatch::current_mesh, c10::impl::tls_is_dispatch_key_included(kDTensorKey)}; }
  void apply() const {
    dispatch::current_mesh = mesh;
    dispatch::region = (dispatch::region & dispatch::kRecording) | (mesh ? reinterpret_cast<uint64_t>(mesh->id()) : 0);
    c10::impl::tls_set_dispatch_key_included(kDTensorKey, include);
  }
};
using MeshRegion = detail::RegionOf<MeshSetting>;

const DeviceMesh& of_this_rank(const DeviceMesh& mesh) {
  require(mesh.contains_this_rank(), "Spmd", "this rank is not in the mesh {}; hint: dt::on(mesh, f) runs f where the mesh is", mesh.str());
  return mesh;
}

}  // namespace

std::shared_ptr<detail::Region> detail::begin_spmd(const DeviceMesh& mesh) {
  const auto own = std::make_shared<const DeviceMesh>(mesh);
  return MeshRegion::begin({own.get(), true}, own);
}

Spmd::Spmd(const DeviceMesh& mesh) : region_(detail::begin_spmd(of_this_rank(mesh))) {}
Spmd::~Spmd() { region_->end(); }

NoSpmd::NoSpmd() : region_(MeshRegion::begin({nullptr, false})) {}
NoSpmd::~NoSpmd() { region_->end(); }

const DeviceMesh* Spmd::current() { return dispatch::current_mesh; }

void set_replication_check(bool on) { dispatch::checks_replicated = on; }
bool replication_check() { return dispatch::checks_replicated; }

std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh) { return dispatch::ranks_that_differ(tensor, mesh); }

}  // namespace dtensor
