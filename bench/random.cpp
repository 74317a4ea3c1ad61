// What a rank's shard of a large random tensor costs: normal_ of 16 million elements, of which one of four ranks has a quarter, against
// the plain operator on the whole: libtorch's, in both cases. Counter ratio; fake transport, nothing is sent.
#include "main.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <benchmark/benchmark.h>

#include <chrono>

namespace dt = dtensor;

namespace {

constexpr int64_t kRows = 4096, kColumns = 4096;

template <class Body>
double seconds(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void normal(benchmark::State& state, const std::vector<int64_t>& sizes, const dt::Placement& placement, bool by_counter) {
  dt::World world(dt::comm::make_fake_transport(1, 4));
  dt::World::Use use(world);
  dt::set_generator_check(dt::GeneratorCheck::off);
  const auto mesh = dt::init_device_mesh(torch::kCPU, {4});
  const auto plain = torch::empty(sizes), part = dt::empty(sizes, mesh, {placement}).tensor();
  const auto generator = by_counter ? dt::Generator(1) : world.generator();
  double best_plain = 1e9, best_part = 1e9;
  for (auto _ : state) {
    best_plain = std::min(best_plain, seconds([&] { plain.normal_(); }));
    const double time = seconds([&] { part.normal_(0, 1, generator); });
    best_part = std::min(best_part, time);
    state.SetIterationTime(time);
  }
  state.counters["plain_ms"] = best_plain * 1e3;
  state.counters["part_ms"] = best_part * 1e3;
  state.counters["ratio"] = best_part / best_plain;
}

#define DTENSOR_BENCH(name, sizes, placement)                                                                       \
  void name(benchmark::State& state) { normal(state, std::vector<int64_t> sizes, placement, state.range(0) != 0); } \
  BENCHMARK(name)->ArgName("counter")->Arg(0)->Arg(1)->UseManualTime()->Iterations(10)->Unit(benchmark::kMillisecond)

DTENSOR_BENCH(rows, ({kRows, kColumns}), dt::shard(0));
DTENSOR_BENCH(columns, ({kRows, kColumns}), dt::shard(1));
DTENSOR_BENCH(columns_strided, ({kRows, kColumns}), dt::strided_shard(1, 8));
DTENSOR_BENCH(short_rows, ({kRows * kColumns / 64, 64}), dt::shard(1));
DTENSOR_BENCH(single_elements, ({kRows * kColumns / 4, 4}), dt::shard(1));
DTENSOR_BENCH(middle, ({256, 16, 4096}), dt::shard(1));

}  // namespace
