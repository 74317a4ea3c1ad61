// What the machine's memory gives to all cores at once: each copies 64 MB of its own, in huge pages. Bytes per second, read and written.
#include <benchmark/benchmark.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

namespace {

constexpr size_t kBytes = 64 << 20;

std::unique_ptr<void, decltype(&std::free)> block(int value) {
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(2 << 20, kBytes), &std::free);
  madvise(memory.get(), kBytes, MADV_HUGEPAGE);
  std::memset(memory.get(), value, kBytes);
  return memory;
}

void copy(benchmark::State& state) {
  const auto from = block(1), to = block(2);
  for (auto _ : state) {
    std::memcpy(to.get(), from.get(), kBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * 2 * static_cast<int64_t>(kBytes));
}
BENCHMARK(copy)->Threads(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())))->UseRealTime()->MinTime(0.5);

}  // namespace

BENCHMARK_MAIN();
