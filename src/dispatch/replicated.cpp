// Compares tensors that should be equal on every rank, by a hash.
#include "src/dispatch/replicated.hpp"

#include "src/comm/describe.hpp"
#include "src/dispatch/compared.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/mesh/world.hpp>

#include <ATen/ops/scalar_tensor.h>
#include <fmt/ranges.h>
#include <range/v3/numeric/iota.hpp>

#include <cstdlib>
#include <cstring>
#include <string_view>
#include <unordered_map>

namespace dtensor::dispatch {

namespace {

struct ComparedByMesh {
  std::unordered_map<const void*, Compared> of;
};

// FNV-1a over the tensor's bytes in row-major order.
int64_t hash_of(const at::Tensor& tensor) {
  const auto on_host = tensor.cpu().contiguous();
  const auto* bytes = static_cast<const unsigned char*>(on_host.data_ptr());
  const auto count = static_cast<size_t>(on_host.numel()) * on_host.element_size();
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

bool check_by_default() {
  const char* value = std::getenv("DTENSOR_CHECK_REPLICATED");
  return !value || std::string_view(value) != "0";
}

}  // namespace

thread_local bool checks_replicated = check_by_default();

Compared& compared(const DeviceMesh& mesh) { return mesh.world().local<ComparedByMesh>().of[mesh.id()]; }

std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh) {
  std::vector<int64_t> dims(mesh.ndim());
  ranges::iota(dims, 0);
  return ranks_that_differ(tensor, mesh, dims);
}

std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh, c10::ArrayRef<int64_t> dims) {
  if (mesh.size() == 1) return {};
  comm::Cause cause(comm::kCheck, true);
  LocalMode local;
  auto& group = mesh.communicator(dims);
  const auto mine = at::scalar_tensor(hash_of(tensor), at::kLong).reshape({1});
  const auto all = group.all_gather(mine, std::vector<int64_t>(group.size(), 1)).get();
  const auto* hashes = static_cast<const int64_t*>(all.data_ptr());
  std::string differing;
  for (int i = 1; i < group.size(); ++i) {
    if (hashes[i] != hashes[0]) differing += fmt::format("{}{}", differing.empty() ? "" : ", ", group.ranks()[i]);
  }
  return differing;
}

void check_replicated(std::string_view op, const at::Tensor& tensor, const DeviceMesh& mesh) {
  comm::Subject subject(op);
  const auto differing = ranks_that_differ(tensor, mesh);
  require(differing.empty(), op,
          "a tensor of sizes [{}] counts as replicated inside Spmd, but its values on ranks {} differ from rank {}'s; "
          "hint: make it the same on every rank (same seed, same data; a model is made inside of the function that dt::launch runs), or "
          "say what it is with from_local; "
          "set_replication_check(false) or DTENSOR_CHECK_REPLICATED=0 turns this check off",
          fmt::join(tensor.sizes(), ", "), differing, mesh.ranks()[0]);
}

}  // namespace dtensor::dispatch
