// What the machine's memory gives to all cores at once: each copies 64 MB of its own. Bytes per second, read and written.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = 64 << 20;

void copy(benchmark::State& state) {
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), kBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * 2 * static_cast<int64_t>(kBytes));
}
BENCHMARK(copy)->Threads(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())))->UseRealTime()->MinTime(0.5);

}  // namespace

BENCHMARK_MAIN();
