// Latency and bandwidth of collectives: transport x collective x ranks x bytes per rank. One iteration is one collective
// that every rank waits for; the time is rank 0's. Under a launcher the ranks are its processes:
// dtensor-run -n 4 build/bench/collectives [--transport gloo]
#include "ranks.hpp"

#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

namespace {

using dtensor::ReduceOp;
using dtensor::World;
using dtensor::comm::Communicator;

void run_collective(Communicator& group, const std::string& kind, const at::Tensor& input, const std::vector<int64_t>& counts) {
  if (kind == "all_reduce") group.all_reduce(input, ReduceOp::sum).get();
  if (kind == "all_gather") group.all_gather(input, counts).get();
  if (kind == "all_to_all") group.all_to_all(input, counts, counts).get();
  if (kind == "reduce_scatter") group.reduce_scatter(input, counts, ReduceOp::sum).get();
}

const std::vector<std::string> kKinds{"all_reduce", "all_gather", "reduce_scatter", "all_to_all"};
const std::vector<int64_t> kBytes{1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};

// Of a tensor of so many bytes or a few more, that ranks can share evenly.
int64_t floats_in(int64_t bytes, int64_t ranks) { return (bytes / 4 + ranks - 1) / ranks * ranks; }

std::shared_ptr<Communicator> connect_all(World& world) {
  std::vector<int> everyone(world.size());
  std::iota(everyone.begin(), everyone.end(), 0);
  return world.transport().connect("bench", everyone);
}

// Without a benchmark library, whose number of iterations only one process would know: the best and the median of many batches.
void measure_job(World& world) {
  using Clock = std::chrono::steady_clock;
  auto group = connect_all(world);
  for (const auto& kind : kKinds) {
    for (const int64_t bytes : kBytes) {
      const int64_t elements = floats_in(bytes, world.size()), batch = bytes <= (64 << 10) ? 50 : 2;
      const std::vector<int64_t> counts(world.size(), elements / world.size());
      const auto input = at::ones({kind == "all_gather" ? counts[0] : elements});
      std::vector<double> times;
      for (int i = 0; i < 30; ++i) {
        group->barrier();
        const auto start = Clock::now();
        for (int64_t k = 0; k < batch; ++k) run_collective(*group, kind, input, counts);
        times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / static_cast<double>(batch));
      }
      std::ranges::sort(times);
      if (world.rank() > 0) continue;
      const auto name = std::string(world.transport().name()) + "/" + kind + "/ranks:" + std::to_string(world.size());
      std::printf("%s/bytes:%lld best %.1f us, median %.1f us\n", name.c_str(), static_cast<long long>(bytes), times[0],
                  times[times.size() / 2]);
    }
  }
}

// `bytes` is the size of the input, except for all_gather, where it is that of the result.
void measure(benchmark::State& state, const std::string& transport, const std::string& kind, int ranks, int64_t bytes) {
  bench::on_ranks(state, ranks, transport, [&](World& world) -> std::function<void()> {
    const int64_t elements = floats_in(bytes, ranks);
    const std::vector<int64_t> counts(ranks, elements / ranks);
    const auto input = at::ones({kind == "all_gather" ? counts[0] : elements});
    return [=, group = connect_all(world)] { run_collective(*group, kind, input, counts); };
  }, 10);
  state.SetBytesProcessed(state.iterations() * bytes);
}

}  // namespace

int main(int argc, char** argv) {
  if (std::getenv("RANK")) return dtensor::launch(argc, argv, measure_job);
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const auto& kind : kKinds) {
      for (int ranks : {2, 4}) {
        for (const int64_t bytes : kBytes) {
          const auto name = transport + "/" + kind + "/ranks:" + std::to_string(ranks) + "/bytes:" + std::to_string(bytes);
          benchmark::RegisterBenchmark(name.c_str(), measure, transport, kind, ranks, bytes)->Unit(benchmark::kMicrosecond)->UseRealTime();
        }
      }
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
