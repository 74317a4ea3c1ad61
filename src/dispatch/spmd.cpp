#include <dtensor/spmd.hpp>

#include "src/dispatch/decide.hpp"
#include "src/dispatch/fast_thread_local.hpp"
#include "src/dispatch/guard.hpp"

#include <dtensor/comm/record.hpp>
#include <dtensor/compat.hpp>
#include <dtensor/error.hpp>

#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

namespace dtensor {

namespace {

DTENSOR_FAST_THREAD_LOCAL const DeviceMesh* current_mesh = nullptr;

bool check_by_default() {
  const char* value = std::getenv("DTENSOR_CHECK_REPLICATED");
  return !value || std::string_view(value) != "0";
}
thread_local bool check_replicated_tensors = check_by_default();

}  // namespace

Spmd::Spmd(const DeviceMesh& mesh)
    : mesh_(mesh), outer_(current_mesh), was_included_(c10::impl::tls_is_dispatch_key_included(kDTensorKey)) {
  require(mesh.contains_this_rank(), "Spmd", "this rank is not in the mesh {}", mesh.str());
  c10::impl::tls_set_dispatch_key_included(kDTensorKey, true);
  current_mesh = &mesh_;
}

Spmd::~Spmd() {
  current_mesh = outer_;
  c10::impl::tls_set_dispatch_key_included(kDTensorKey, was_included_);
}

const DeviceMesh* Spmd::current() { return current_mesh; }

void set_replication_check(bool on) { check_replicated_tensors = on; }
bool replication_check() { return check_replicated_tensors; }

namespace dispatch {

namespace {

// FNV-1a over the tensor's bytes in row-major order.
int64_t hash_of(const at::Tensor& tensor) {
  const auto contiguous = tensor.contiguous();
  const auto* bytes = static_cast<const unsigned char*>(contiguous.data_ptr());
  const auto count = static_cast<size_t>(contiguous.numel()) * contiguous.element_size();
  uint64_t hash = 0xcbf29ce484222325ull;
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    hash = (hash ^ word) * 0x100000001b3ull, hash ^= hash >> 29;
  }
  for (; i < count; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  return static_cast<int64_t>(hash);
}

}  // namespace

void check_replicated(std::string_view op, const at::Tensor& tensor, const DeviceMesh& mesh) {
  if (mesh.size() == 1) return;
  comm::Cause cause(comm::kCheck, true);
  LocalMode local;
  std::vector<int64_t> dims(mesh.ndim());
  for (int64_t d = 0; d < mesh.ndim(); ++d) dims[d] = d;
  const auto mine = at::scalar_tensor(hash_of(tensor), at::kLong).reshape({1});
  const auto all = mesh.communicator(dims).all_gather(mine, std::vector<int64_t>(mesh.size(), 1)).get();
  const auto* hashes = static_cast<const int64_t*>(all.data_ptr());
  std::string differing;
  for (int64_t i = 1; i < mesh.size(); ++i) {
    if (hashes[i] != hashes[0]) differing += fmt::format("{}{}", differing.empty() ? "" : ", ", mesh.ranks()[i]);
  }
  require(differing.empty(), op,
          "a plain tensor of sizes [{}] is used as replicated inside Spmd, but its values on ranks {} differ from rank {}'s; "
          "hint: make it the same on every rank (same seed, same data), or say what it is with from_local; "
          "set_replication_check(false) or DTENSOR_CHECK_REPLICATED=0 turns this check off",
          fmt::join(tensor.sizes(), ", "), differing, mesh.ranks()[0]);
}

}  // namespace dispatch
}  // namespace dtensor
