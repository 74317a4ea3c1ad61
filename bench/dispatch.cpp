// What a DTensor adds to an operator: the time of the operator on a DTensor less that on a plain tensor of the local size, with
// the decision cached, on one thread. Counter overhead_us; mesh sizes 2, 64 and 4096 (fake transport, nothing is sent).
#include "dispatch_cases.hpp"
#include "main.hpp"

#include <algorithm>
#include <chrono>

namespace {

using Body = std::function<void(bench::Tensors&)>;

double microseconds(const Body& body, bench::Tensors& tensors, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body(tensors);
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / calls;
}

// Plain and distributed run in short turns, so that a slow moment of the machine hits both; the fastest of each is what they cost.
void compare(benchmark::State& state, const bench::Case& one) {
  bench::Tensors tensors(state.range(0));
  double plain = 1e9, distributed = 1e9;
  microseconds(one.plain, tensors, one.calls), microseconds(one.distributed, tensors, one.calls);
  for (auto _ : state) {
    plain = std::min(plain, microseconds(one.plain, tensors, one.calls));
    const double time = microseconds(one.distributed, tensors, one.calls);
    distributed = std::min(distributed, time);
    state.SetIterationTime(time * 1e-6);
  }
  state.counters["plain_us"] = plain;
  state.counters["dtensor_us"] = distributed;
  state.counters["overhead_us"] = distributed - plain;
}

[[maybe_unused]] const bool registered = [] {
  for (const bench::Case& one : bench::cases()) {
    benchmark::RegisterBenchmark(one.name.c_str(), compare, one)->Arg(2)->Arg(64)->Arg(4096)->UseManualTime()->Iterations(200);
  }
  return true;
}();

}  // namespace
