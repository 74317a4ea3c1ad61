// Moves between two meshes: every pair of layouts on meshes that are the same, overlap or are disjoint, and random ones; plans; messages.
#include "tests/support/core_support.hpp"
#include "tests/support/refuses.hpp"
#include "tools/moves/check.hpp"

#include <ATen/ATen.h>
#include <range/v3/numeric/iota.hpp>

#include <dtensor/base/error.hpp>

#include <chrono>

using namespace dtensor;
using namespace dtensor::test;

namespace {

std::vector<DeviceMesh> meshes_of_four() {
  return {DeviceMesh(at::kCPU, {0, 1}, {2}, {"a"}),
          DeviceMesh(at::kCPU, {2, 3}, {2}, {"a"}),
          DeviceMesh(at::kCPU, {0, 1, 2}, {3}, {"a"}),
          DeviceMesh(at::kCPU, {1, 3}, {2}, {"a"}),
          DeviceMesh(at::kCPU, {0, 1, 2, 3}, {2, 2}, {"a", "b"}),
          DeviceMesh(at::kCPU, {0, 1, 2, 3}, {4}, {"a"})};
}

// Every layout of `choices` that fits a mesh.
std::vector<LayoutPtr> layouts_on(const DeviceMesh& mesh, const std::vector<Placement>& choices, const std::vector<int64_t>& sizes) {
  std::vector<Placements> all{{}};
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    std::vector<Placements> longer;
    for (const auto& prefix : all) {
      for (const auto& choice : choices) longer.push_back(prefix), longer.back().push_back(choice);
    }
    all = std::move(longer);
  }
  std::vector<LayoutPtr> result;
  for (const auto& placements : all) {
    try {
      result.push_back(Layout::get(mesh, placements, sizes, at::kDouble));
    } catch (const Error&) {  // does not fit
    }
  }
  return result;
}

const std::vector<Placement> kPlacements{replicate(),
                                         shard(0),
                                         shard(1),
                                         strided_shard(0, 2),
                                         ragged_shard(0, {3, 0}, 2),
                                         ragged_shard(1, {1, 0, 2}),
                                         ragged_shard(0, {1, 0, 0, 2}),
                                         flat(19, 2),
                                         partial()};

int check_all_pairs(const std::vector<int64_t>& sizes, const std::string& transport, size_t every) {
  std::atomic<int> count = 0;
  on_ranks(
      4,
      [&](World& world) {
        std::vector<LayoutPtr> all;
        for (const auto& mesh : meshes_of_four()) {
          for (auto& layout : layouts_on(mesh, kPlacements, sizes)) all.push_back(std::move(layout));
        }
        for (size_t i = 0; i < all.size() * all.size(); i += every) {
          moves::check({all[i / all.size()], all[i % all.size()]});
          if (world.rank() == 0) ++count;
        }
      },
      transport);
  return count;
}

}  // namespace

TEST_CASE("moves between meshes: every pair of layouts", "[redistribute]") { CHECK(check_all_pairs({6, 5}, "threads", 1) > 5000); }

TEST_CASE("moves between meshes: pairs on other transports", "[redistribute]") {
  for (const std::string transport : {"shm", "gloo"}) {
    INFO(transport);
    CHECK(check_all_pairs({6, 5}, transport, 7) > 700);
  }
}

TEST_CASE("moves between meshes: random pairs", "[redistribute]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      INFO(transport << ", " << ranks << " ranks");
      CHECK_NOTHROW(on_ranks(
          ranks,
          [&](World& world) {
            for (uint64_t seed = 0; seed < (transport == "threads" ? 200 : 40); ++seed) {
              std::mt19937_64 random(seed + 1000 * static_cast<uint64_t>(world.size()));
              moves::check(moves::random_pair(random));
            }
          },
          transport));
    }
  }
}

TEST_CASE("moves between meshes: a tensor that is flat in the order of memory", "[redistribute]") {
  CHECK_NOTHROW(on_ranks(4, [](World&) {
    const DeviceMesh first(at::kCPU, {0, 1}, {2}, {"a"}), second(at::kCPU, {1, 2, 3}, {3}, {"a"});
    const auto whole = at::arange(30, at::kDouble).view({5, 6});
    auto tensor = distribute_tensor(whole.t(), first, {flat(17)});
    for (const auto& placement : {flat(11, 3), shard(0), replicate(), flat(13)}) {
      auto moved = tensor.redistribute(second, {placement});
      if (!moved.is_absent()) require(moved.full_tensor().equal(whole.t()), "test", "to {}", placement.str());
      tensor = moved.redistribute(first, {flat(17)});
      if (!tensor.is_absent()) require(tensor.full_tensor().equal(whole.t()), "test", "from {}", placement.str());
    }
  }));
}

TEST_CASE("moves between meshes: large parts go while nobody waits", "[redistribute]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    INFO(transport);
    CHECK_NOTHROW(on_ranks(
        4,
        [](World&) {
          const DeviceMesh first(at::kCPU, {0, 1}, {2}, {"a"}), second(at::kCPU, {2, 3}, {2}, {"a"});
          const auto whole = at::arange(3 << 20, at::kFloat).view({3, 1 << 20});
          std::vector<DTensor> there;
          for (int i = 0; i < 3; ++i) {
            auto here = distribute_tensor(whole + i, first, {shard(1)});
            there.push_back(here.redistribute(second, {shard(0)}));
            if (!here.is_absent()) here.to_local().zero_();  // what was sent is its own
          }
          for (int i = 0; i < 3; ++i) {
            if (!there[i].is_absent()) require(there[i].full_tensor().equal(whole + i), "test", "message {}", i);
          }
        },
        transport));
  }
}

TEST_CASE("moves between meshes: plans of many ranks are made quickly and are even", "[redistribute]") {
  Alone alone(512, 300);
  std::vector<int> half(256);
  ranges::iota(half, 256);
  const auto all = init_device_mesh(at::kCPU, {32, 16}, {"dp", "tp"});
  const DeviceMesh generation(at::kCPU, half, {64, 4}, {"dp", "tp"});
  const auto from = Layout::get(all, Placements{shard(0), shard(1)}, {4096, 4096}, at::kFloat);
  const auto to = from->with(generation, Placements{replicate(), shard(0)});
  const auto plan = plan_move_between(from, to);
  int64_t sent = 0, received = 0, kept = 0;
  for (const auto& each : plan.sent) sent += each.numel();
  for (const auto& each : plan.received) received += each.numel();
  for (const auto& each : plan.kept) kept += each.numel();
  REQUIRE(received + kept == 4096 * 1024);
  REQUIRE(plan.ranks.size() == 512);
  REQUIRE(sent > 0);
}

TEST_CASE("moves between meshes: ranks that have the same send the same", "[redistribute]") {
  int64_t total = 0;
  for (int rank = 0; rank < 3; ++rank) {
    Alone alone(32, rank);
    const DeviceMesh few(at::kCPU, {0, 1, 2}, {3}, {"x"});
    const auto all = init_device_mesh(at::kCPU, {32});
    const auto whole = Layout::get(few, Placements{replicate()}, {30, 100}, at::kFloat);
    int64_t sent = 0;
    for (const auto& transfer : plan_move_between(whole, whole->with(all, Placements{replicate()})).sent) sent += transfer.numel();
    REQUIRE(sent == 29 * 1000);
    total += sent;
    REQUIRE_FALSE(plan_move_between(whole->with(all, Placements{replicate()}), whole->with(few, Placements{shard(0)})).communicates);
    REQUIRE(plan_move_between(whole, whole->with(all, Placements{shard(0)})).str().substr(0, 6) == "sends ");
  }
  REQUIRE(total == 29 * 3000);
}

// The ranks end while the transport still reads what they were sent.
TEST_CASE("moves between meshes: results that nobody reads do not hold up the end", "[redistribute]") {
  std::chrono::duration<double> slowest{0};
  for (int i = 0; i < 10; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    REQUIRE_NOTHROW(on_ranks(
        4,
        [](World&) {
          const DeviceMesh first(at::kCPU, {0, 1}, {2}, {"a"}), second(at::kCPU, {2, 3}, {2}, {"b"});
          const auto x = ones({1 << 22}, first, {shard(0)});
          for (int move = 0; move < 5; ++move) x.redistribute(second, {shard(0)});
        },
        "shm"));
    slowest = std::max<std::chrono::duration<double>>(slowest, std::chrono::steady_clock::now() - begin);
  }
  INFO(slowest.count());
  CHECK(slowest.count() < 2.5);
}

TEST_CASE("moves between meshes: refusals", "[redistribute]") {
  CHECK_NOTHROW(on_ranks(2, [](World& world) {
    const DeviceMesh first(at::kCPU, {0}, {1}, {"a"}), second(at::kCPU, {1}, {1}, {"a"}), both(at::kCPU, {0, 1}, {2}, {"a"});
    const auto x = distribute_tensor(at::ones({2, 3}), first, {replicate()});
    refuses("cannot leave a norm pending", [&] { x.redistribute(both, {partial(ReduceOp::norm2)}); });
    refuses("shard dim 2 is out of range", [&] { x.redistribute(both, {shard(2)}); });
    refuses("got 2 placements", [&] { x.redistribute(both, {shard(0), shard(1)}); });
    const auto from = Layout::get(both, Placements{partial()}, {2}, at::kFloat);
    refuses("reduce it on its own mesh first", [&] { plan_move_between(from, from->with(first, Placements{replicate()})); });
    refuses("the layouts are of different tensors", [&] {
      plan_move_between(Layout::get(first, Placements{replicate()}, {2}, at::kFloat),
                        Layout::get(second, Placements{replicate()}, {3}, at::kFloat));
    });
    require(redistribute(at::ones({2}), second, {replicate()}).equal(at::ones({2})), "test", "a plain tensor is left alone");
    const auto moved = x.redistribute(second, {replicate()});
    require(moved.is_absent() == (world.rank() == 0), "test", "who has it");
  }));
}
