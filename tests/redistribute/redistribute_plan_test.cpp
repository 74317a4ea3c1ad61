// What moves cost, which way the planner takes, and where the prices come from.
#include "tests/support/redistribute_support.hpp"

#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/empty.h>

#include <cstdlib>
#include <fstream>

#include <unistd.h>

using namespace dtensor;
using namespace dtensor::test;

TEST_CASE("moves price like distances", "[redistribute]") {
  Alone alone(8);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 4}, {"dp", "tp"});
  for (const auto& shape : {Shape{16, 12}, Shape{2048, 1200}, Shape{13, 6}}) {
    const auto whole = at::empty(shape, at::kFloat);
    const auto all =
        layouts(mesh, {replicate(), shard(0), shard(1), strided_shard(1, 3), partial(), partial(ReduceOp::max)}, whole);
    for (const auto& a : all) {
      for (const auto& b : all) {
        const double direct = move_seconds(a, b);
        REQUIRE(direct == plan_move(a, b).seconds);
        REQUIRE((a == b ? direct == 0 : direct >= 0));
        if (direct == 0) continue;
        double best = direct;
        for (const auto& c : all) best = std::min(best, move_seconds(a, c) + move_seconds(c, b));
        INFO(a->str() << " -> " << b->str());
        REQUIRE(best >= direct * (1 - 1e-9));
      }
    }
  }
}

TEST_CASE("the planner shards what is replicated before it crosses a slow dimension", "[redistribute]") {
  Alone alone(64);
  const auto mesh = init_device_mesh(c10::kCPU, {8, 8}, {"dp", "tp"});
  const auto from = Layout::get(mesh, Placements{shard(0), replicate()}, {4096, 4096}, at::kFloat);
  const auto swap = from->with({replicate(), shard(0)});
  // Directly, each rank would receive 7/8 of the tensor.
  REQUIRE(move_seconds(from, swap) < 0.5 * move_seconds(from, from->with({replicate(), replicate()})));

  const auto gathered = from->with({replicate(), replicate()});
  REQUIRE(plan_move(from, gathered).steps.size() == 1);
  set_comm_cost("dp", {20e-6, 1e9, 1e11});
  set_comm_cost("tp", {20e-6, 4e11, 1e11});
  const auto plan = plan_move(from, gathered);
  INFO(plan.str());
  REQUIRE(plan.steps.size() >= 3);
  REQUIRE(plan.steps[0].str() == "R -> S(1): chunk on tp");
  REQUIRE(plan.steps[1].str() == "S(0) -> R: all_gather on dp");
  REQUIRE(plan.seconds < 0.01);
}

TEST_CASE("plans are the same on every rank", "[redistribute]") {
  std::string first;
  for (int rank = 0; rank < 6; ++rank) {
    Alone alone(6, rank);
    const auto mesh = init_device_mesh(c10::kCPU, {2, 3});
    const auto whole = at::empty({13, 6}, at::kFloat);
    const auto all = layouts(mesh, {replicate(), shard(0), shard(1), strided_shard(1, 3), partial()}, whole);
    std::string plans;
    for (const auto& a : all) {
      for (const auto& b : all) plans += plan_move(a, b).str() + "\n";
    }
    if (rank == 0) first = plans;
    REQUIRE(plans == first);
  }
}

TEST_CASE("costs come from a file", "[redistribute]") {
  const auto path =
      fmt::format("{}/dtensor_costs_{}.json", std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp", getpid());
  const auto with_file = [&](const std::string& text, const std::function<void(const DeviceMesh&)>& body) {
    std::ofstream(path) << text;
    setenv("DTENSOR_COST_FILE", path.c_str(), 1);
    Alone alone(4);
    body(init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"}));
  };
  with_file(R"({"default": {"latency": 1e-3}, "tp": {"bandwidth": 2e11}})", [](const DeviceMesh& mesh) {
    REQUIRE(comm_cost(mesh, 0).latency == 1e-3);
    REQUIRE(comm_cost(mesh, 0).bandwidth == CommCost{}.bandwidth);
    REQUIRE(comm_cost(mesh, 1).latency == 1e-3);
    REQUIRE(comm_cost(mesh, 1).bandwidth == 2e11);
    const auto layout = Layout::get(mesh, Placements{shard(0), replicate()}, {4, 4}, at::kFloat);
    REQUIRE(move_seconds(layout, layout->with({replicate(), replicate()})) >= 1e-3);
    set_comm_cost("dp", {});
    REQUIRE(comm_cost(mesh, 0).latency == CommCost{}.latency);
    REQUIRE(move_seconds(layout, layout->with({replicate(), replicate()})) < 1e-3);
    REQUIRE_THROWS_WITH(set_comm_cost("dp", {0, 0, 1}), says("expected positive"));
  });
  with_file("[1, 2",
            [](const DeviceMesh& mesh) { REQUIRE_THROWS_WITH(comm_cost(mesh, 0), says("is not a JSON object")); });
  with_file(R"({"tp": {"speed": 1}})",
            [](const DeviceMesh& mesh) { REQUIRE_THROWS_WITH(comm_cost(mesh, 0), says("\"speed\": 1")); });
  with_file(R"({"tp": {"bandwidth": -1}})",
            [](const DeviceMesh& mesh) { REQUIRE_THROWS_WITH(comm_cost(mesh, 0), says("expected positive")); });
  std::remove(path.c_str());
  Alone alone(2);
  REQUIRE_THROWS_WITH(comm_cost(init_device_mesh(c10::kCPU, {2}), 0), says("cannot read " + path));
  unsetenv("DTENSOR_COST_FILE");
}

TEST_CASE("moves that make no sense say why", "[redistribute]") {
  Alone alone(4);
  const auto mesh = init_device_mesh(c10::kCPU, {4}), other = init_device_mesh(c10::kCPU, {2, 2});
  const auto get = [](const DeviceMesh& m, Placements p, Shape s, at::ScalarType t) { return Layout::get(m, p, s, t); };
  const auto from = get(mesh, {shard(0)}, {8}, at::kFloat);
  REQUIRE_THROWS_WITH(plan_move(from, get(other, {shard(0), replicate()}, {8}, at::kFloat)), says("between meshes"));
  REQUIRE_THROWS_WITH(plan_move(from, get(mesh, {replicate()}, {9}, at::kFloat)),
                      says("different tensors; got f32[8]"));
  REQUIRE_THROWS_WITH(plan_move(from, get(mesh, {replicate()}, {8}, at::kDouble)), says("different tensors"));
  REQUIRE_THROWS_WITH(move_local(at::empty({3}), from, from->with({replicate()})), says("got Float [3]; expected [2]"));
  const auto norm = get(mesh, {partial(ReduceOp::norm2)}, {8}, at::kLong);
  REQUIRE_THROWS_WITH(move_local(at::zeros_like(at::empty({8}, at::kLong)), norm, norm->with({replicate()})),
                      says("P(norm2) needs floating point values; got Long"));
}
