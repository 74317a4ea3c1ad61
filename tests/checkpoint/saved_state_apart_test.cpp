// Loading in layouts in which ranks want other bytes of a tensor: each reads its own.
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>

#include <fmt/ranges.h>

namespace dt = dtensor;
using namespace dt::test;

namespace {

at::Tensor counted(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  return torch::arange(c10::multiply_integers(sizes)).remainder(dtype == at::kBool ? 2 : 251).reshape(sizes).to(dtype);
}

struct ApartCase {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  dt::Placements saved, loaded;
};

// On a mesh of 2 x 2 ranks, whose runs have at least a page.
const std::vector<ApartCase> kApart{
    {{64, 8192}, at::kFloat, {dt::shard(0), dt::shard(0)}, {dt::shard(1), dt::shard(1)}},
    {{64, 8192}, at::kDouble, {dt::shard(0), dt::shard(0)}, {dt::shard(1), dt::shard(0)}},
    {{6, 5, 9000}, at::kBFloat16, {dt::shard(2), dt::replicate()}, {dt::shard(1), dt::shard(0)}},
    {{40, 262'144}, at::kBool, {dt::replicate(), dt::replicate()}, {dt::shard(1), dt::shard(1)}},
    {{8, 4, 4096}, at::kLong, {dt::shard(0), dt::shard(2)}, {dt::shard(1), dt::shard(1)}},
};

}  // namespace

TEST_CASE("checkpoint: ranks that want other bytes of a tensor read their own and send none", "[checkpoint]") {
  for (const auto* transport : {"threads", "shm", "gloo"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](dt::World&) {
          const auto mesh = dt::init_device_mesh(c10::kCPU, {2, 2});
          for (size_t i = 0; i < kApart.size(); ++i) {
            const auto& [sizes, dtype, saved, loaded] = kApart[i];
            const auto whole = counted(sizes, dtype);
            auto x = dt::distribute_tensor(whole, mesh, saved).tensor();
            auto y = dt::distribute_tensor(torch::zeros_like(whole), mesh, loaded).tensor().clone();
            dt::save({{"x", x}}, folder.path, static_cast<int64_t>(i));
            dt::load({{"x", y}}, folder.path, static_cast<int64_t>(i));
            dt::require(dt::full_tensor(y).equal(whole), "test", "case {} has other values", i);
            const auto counts = dt::checkpoints::last_load();
            dt::require(counts.bytes_read == counts.bytes_loaded && counts.bytes_sent < 1000, "test",
                        "case {}: {} bytes are read and {} sent, of a part of {}", i, counts.bytes_read, counts.bytes_sent,
                        counts.bytes_loaded);
          }
        },
        transport));
  }
}

TEST_CASE("checkpoint: what ranks read for themselves goes into memory of any strides", "[checkpoint]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {2});
    const auto whole = counted({64, 4096}, at::kFloat);
    auto rows = dt::distribute_tensor(whole, mesh, {dt::shard(0)}).tensor();
    dt::save({{"x", rows}}, folder.path, 1);
    const std::vector<at::Tensor> locals{torch::zeros({2048, 64}).t(), torch::zeros({64, 3000}).slice(1, 0, 2048),
                                         torch::zeros({64, 4096}).slice(1, 0, 4096, 2)};
    for (const auto& local : locals) {
      auto y = dt::from_local(local, mesh, {dt::shard(1)}).tensor();
      dt::load({{"x", y}}, folder.path, 1);
      dt::require(local.equal(whole.narrow(1, 2048 * world.rank(), 2048)), "test", "other values at strides {}",
                  fmt::join(local.strides(), ", "));
      // Of each rank's 32 saved rows, 32 runs of 8 KiB are wanted, and the 31 gaps between them are as long: they are read over.
      const auto read = dt::checkpoints::last_load().bytes_read;
      dt::require(read == 2 * (32 + 31) * 8192, "test", "{} bytes are read", read);
    }
  }));
}
