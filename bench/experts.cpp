// A layer of experts (2048 tokens of 256 numbers, 8 experts of width 512, two each), forward and backward, on one rank and, experts and
// tokens cut, on two that are threads: counter ratio is one rank's time over two's, cpu_ratio the same of processor time per rank, which
// does not mind other programs.
#include "clocks.hpp"
#include "main.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/parallel/expert/mix.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <mutex>

namespace dt = dtensor;

namespace {

constexpr int64_t kTokens = 2048, kDim = 256, kHidden = 512, kExperts = 8, kChoices = 2;

struct Cost {
  double wall = 0, processor = 0;  // of a pass; the median, of the slowest rank
};

Cost run(int ranks, const std::string& dispatch) {
  constexpr int kWarmUp = 2, kCounted = 9;
  dt::LaunchOptions options;
  options.ranks = ranks;
  std::mutex mutex;
  Cost cost;
  dt::launch(options, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {ranks}, {"ep"});
    torch::manual_seed(0);
    const auto cut = [&](const torch::Tensor& x) { return dt::distribute_tensor(x, mesh, {dt::shard(0)}).tensor().requires_grad_(); };
    const auto w1 = cut(torch::randn({kExperts, kHidden, kDim}) * 0.02), w2 = cut(torch::randn({kExperts, kDim, kHidden}) * 0.02);
    const auto gate = dt::distribute_tensor(torch::randn({kExperts, kDim}) * 0.1, mesh, {dt::replicate()}).tensor().requires_grad_();
    const auto x = cut(torch::randn({kTokens, kDim})), g = cut(torch::randn({kTokens, kDim})).detach();
    const dt::Spmd spmd(mesh);
    std::vector<double> walls, processors;
    for (int i = 0; i < kWarmUp + kCounted; ++i) {
      for (const auto& leaf : {w1, w2, gate, x}) leaf.mutable_grad() = torch::Tensor();
      const auto wall = bench::wall_ms(), processor = bench::processor_ms();
      const auto scores = torch::linear(x, gate).softmax(-1);
      const auto [weights, chosen] = scores.topk(kChoices, -1);
      dt::mix_experts(x, chosen, weights, {w1, w2}, {.dispatch = dispatch}).backward(g);
      if (i < kWarmUp) continue;
      walls.push_back(bench::wall_ms() - wall), processors.push_back(bench::processor_ms() - processor);
    }
    std::ranges::sort(walls), std::ranges::sort(processors);
    const std::lock_guard lock(mutex);
    cost.wall = std::max(cost.wall, walls[kCounted / 2]);
    cost.processor = std::max(cost.processor, processors[kCounted / 2]);
  });
  return cost;
}

void layer(benchmark::State& state, const std::string& dispatch) {
  std::vector<double> ratios, of_processors;
  Cost one, two;
  for (auto _ : state) {
    one = run(1, dispatch), two = run(2, dispatch);
    ratios.push_back(one.wall / two.wall), of_processors.push_back(one.processor / two.processor);
    state.SetIterationTime(two.wall * 1e-3);
  }
  std::ranges::sort(ratios), std::ranges::sort(of_processors);
  state.counters["ratio"] = ratios[ratios.size() / 2];
  state.counters["cpu_ratio"] = of_processors[of_processors.size() / 2];
  state.counters["one_ms"] = one.wall;
  state.counters["one_cpu_ms"] = one.processor;
}
BENCHMARK_CAPTURE(layer, alltoall, "alltoall")->Iterations(3)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(layer, deduplicated, "deduplicated")->Iterations(3)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(layer, allgather, "allgather")->Iterations(3)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
