#include <dtensor/spmd.hpp>

#include "src/core/regions.hpp"
#include "src/dispatch/region.hpp"

#include <dtensor/compat.hpp>
#include <dtensor/error.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdlib>
#include <string_view>

namespace dtensor {

namespace {

DTENSOR_FAST_THREAD_LOCAL const DeviceMesh* current_mesh = nullptr;

bool check_by_default() {
  const char* value = std::getenv("DTENSOR_CHECK_REPLICATED");
  return !value || std::string_view(value) != "0";
}
thread_local bool check_replicated_tensors = check_by_default();

struct MeshSetting {
  const DeviceMesh* mesh;
  bool include;  // our key in every call

  static MeshSetting now() { return {current_mesh, c10::impl::tls_is_dispatch_key_included(kDTensorKey)}; }
  void apply() const {
    current_mesh = mesh;
    dispatch::region = (dispatch::region & dispatch::kRecording) | (mesh ? reinterpret_cast<uint64_t>(mesh->id()) : 0);
    c10::impl::tls_set_dispatch_key_included(kDTensorKey, include);
  }
};
using MeshRegion = detail::RegionOf<MeshSetting>;

std::shared_ptr<detail::Region> begin_on(const DeviceMesh& mesh) {
  require(mesh.contains_this_rank(), "Spmd", "this rank is not in the mesh {}", mesh.str());
  const auto own = std::make_shared<const DeviceMesh>(mesh);
  return MeshRegion::begin({own.get(), true}, own);
}

}  // namespace

DTENSOR_FAST_THREAD_LOCAL uint64_t dispatch::region = 0;

Spmd::Spmd(const DeviceMesh& mesh) : region_(begin_on(mesh)) {}
Spmd::~Spmd() { region_->end(); }

NoSpmd::NoSpmd() : region_(MeshRegion::begin({nullptr, false})) {}
NoSpmd::~NoSpmd() { region_->end(); }

const DeviceMesh* Spmd::current() { return current_mesh; }

void set_replication_check(bool on) { check_replicated_tensors = on; }
bool replication_check() { return check_replicated_tensors; }

}  // namespace dtensor
