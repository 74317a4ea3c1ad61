#include <dtensor/spmd.hpp>

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

void enter(const DeviceMesh* mesh, bool include) {
  current_mesh = mesh;
  dispatch::region = (dispatch::region & dispatch::kRecording) | (mesh ? reinterpret_cast<uint64_t>(mesh->id()) : 0);
  c10::impl::tls_set_dispatch_key_included(kDTensorKey, include);
}

}  // namespace

DTENSOR_FAST_THREAD_LOCAL uint64_t dispatch::region = 0;

Spmd::Spmd(const DeviceMesh& mesh)
    : mesh_(mesh), outer_(current_mesh), was_included_(c10::impl::tls_is_dispatch_key_included(kDTensorKey)) {
  require(mesh.contains_this_rank(), "Spmd", "this rank is not in the mesh {}", mesh.str());
  enter(&mesh_, true);
}

Spmd::~Spmd() { enter(outer_, was_included_); }

NoSpmd::NoSpmd() : outer_(current_mesh), was_included_(c10::impl::tls_is_dispatch_key_included(kDTensorKey)) { enter(nullptr, false); }

NoSpmd::~NoSpmd() { enter(outer_, was_included_); }

const DeviceMesh* Spmd::current() { return current_mesh; }

void set_replication_check(bool on) { check_replicated_tensors = on; }
bool replication_check() { return check_replicated_tensors; }

}  // namespace dtensor
