// A training step of recurrent layers with default states on one rank and, the batch cut, on two that are threads: counter ratio is one
// rank's time over two's, cpu_ratio the same of processor time per rank, which does not mind other programs; gathers counts what two ranks
// communicate but for sums of gradients.
#include "clocks.hpp"
#include "main.hpp"

#include <dtensor/dtensor.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <mutex>

namespace dt = dtensor;

namespace {

constexpr int64_t kSteps = 32, kBatch = 64, kIn = 128, kHidden = 256;

struct Cost {
  double wall = 0, processor = 0;  // of a step; the slowest rank's
  int64_t gathers = 0;
};

template <class Layer>
Cost train(int ranks, const std::function<Layer()>& make) {
  constexpr int kWarmUp = 2, kCounted = 5;
  dt::LaunchOptions options;
  options.ranks = ranks;
  std::mutex mutex;
  Cost cost;
  dt::launch(options, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {ranks}, {"dp"});
    const dt::Spmd spmd(mesh);
    torch::manual_seed(0);
    Layer layer = make();
    const auto x = dt::distribute_tensor(torch::randn({kSteps, kBatch, kIn}), mesh, {dt::shard(1)}).tensor();
    const auto step = [&] {
      layer->zero_grad();
      std::get<0>(layer(x)).pow(2).mean().backward();
    };
    for (int i = 0; i < kWarmUp; ++i) step();
    dt::CommDebugMode comm;
    const auto wall = bench::wall_ms(), processor = bench::processor_ms();
    for (int i = 0; i < kCounted; ++i) step();
    std::lock_guard lock(mutex);
    cost.wall = std::max(cost.wall, (bench::wall_ms() - wall) / kCounted);
    cost.processor = std::max(cost.processor, (bench::processor_ms() - processor) / kCounted);
    cost.gathers = comm.count() - comm.count(dt::comm::Collective::all_reduce);
  });
  return cost;
}

template <class Layer>
void compare(benchmark::State& state, const std::function<Layer()>& make) {
  std::vector<double> ratios, of_processors;
  Cost one, two;
  for (auto _ : state) {
    one = train<Layer>(1, make), two = train<Layer>(2, make);
    ratios.push_back(one.wall / two.wall), of_processors.push_back(one.processor / two.processor);
    state.SetIterationTime(two.wall * 1e-3);
  }
  std::ranges::sort(ratios), std::ranges::sort(of_processors);
  state.counters["ratio"] = ratios[ratios.size() / 2];
  state.counters["cpu_ratio"] = of_processors[of_processors.size() / 2];
  state.counters["one_ms"] = one.wall;
  state.counters["gathers"] = static_cast<double>(two.gathers);
}

namespace nn = torch::nn;

void lstm(benchmark::State& state) {
  compare<nn::LSTM>(state, [] { return nn::LSTM(nn::LSTMOptions(kIn, kHidden)); });
}
void gru(benchmark::State& state) {
  compare<nn::GRU>(state, [] { return nn::GRU(nn::GRUOptions(kIn, kHidden)); });
}
void bidirectional_rnn(benchmark::State& state) {
  compare<nn::RNN>(state, [] { return nn::RNN(nn::RNNOptions(kIn, kHidden).bidirectional(true)); });
}
BENCHMARK(lstm)->Iterations(5)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(gru)->Iterations(5)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(bidirectional_rnn)->Iterations(5)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
