// What one rank pays for the size of the world, of 2 to 16384 ranks, on the fake transport: making a two-dimensional mesh, a layout, a plan
// of a move, the first call of an operator (less that on plain tensors) and the next ones, and the memory of all that.
#include "main.hpp"

#include <torch/types.h>

#include <dtensor/dtensor.hpp>

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

namespace dt = dtensor;

namespace {

template <class Body>
double microseconds(int calls, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body(i);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / calls;
}

void world(benchmark::State& state) {
  torch::NoGradGuard no_grad;
  const int64_t ranks = state.range(0), rows = 16384;
  const auto plain = torch::ones({8, 8}), plain_weight = torch::ones({8, 8});
  double mesh_us = 1e9, layout_us = 1e9, plan_us = 1e9, first_us = 1e9, hit_us = 1e9, plain_us = 1e9;
  size_t memory = 0;
  for (auto _ : state) {
    const auto before = mallinfo2().uordblks;
    dt::World world(dt::comm::make_fake_transport(0, static_cast<int>(ranks)));
    dt::World::Use use(world);
    std::optional<dt::DeviceMesh> mesh;
    const auto making = microseconds(1, [&](int) { mesh = dt::init_device_mesh(torch::kCPU, {ranks / 2, 2}, {"dp", "tp"}); });
    mesh_us = std::min(mesh_us, making);
    std::vector<dt::LayoutPtr> layouts;
    const auto layout = [&](dt::PlacementsRef placements, int64_t columns) {
      return dt::Layout::get(*mesh, placements, {rows, columns}, torch::kFloat);
    };
    layout_us = std::min(layout_us, microseconds(20, [&](int i) { layouts.push_back(layout({dt::shard(0), dt::shard(1)}, 1000 + i)); }));
    plan_us = std::min(plan_us, microseconds(20, [&](int i) {
      dt::plan_move(layouts[i], layout({dt::replicate(), dt::shard(0)}, 1000 + i));
    }));
    std::vector<torch::Tensor> xs;
    for (int i = 0; i < 20; ++i) {
      xs.push_back(dt::from_local(torch::ones({8, 8}), *mesh, {dt::shard(0), dt::replicate()}, {4 * ranks, 8}).tensor());
    }
    const auto weight = dt::from_local(plain_weight, *mesh, {dt::replicate(), dt::replicate()}, {8, 8}).tensor();
    first_us = std::min(first_us, microseconds(1, [&](int) { xs[0].mm(weight); }));
    hit_us = std::min(hit_us, microseconds(2000, [&](int i) { xs[i % 20].mm(weight); }));
    plain_us = std::min(plain_us, microseconds(2000, [&](int) { plain.mm(plain_weight); }));
    memory = std::max(memory, static_cast<size_t>(mallinfo2().uordblks - before));
    state.SetIterationTime(making * 1e-6);
  }
  state.counters["mesh_us"] = mesh_us;
  state.counters["layout_us"] = layout_us;
  state.counters["plan_us"] = plan_us;
  state.counters["first_call_us"] = first_us;
  state.counters["hit_us"] = hit_us - plain_us;
  state.counters["memory_kb"] = static_cast<double>(memory) / 1024;
}
BENCHMARK(world)->RangeMultiplier(8)->Range(2, 16384)->UseManualTime()->Iterations(5);

}  // namespace
