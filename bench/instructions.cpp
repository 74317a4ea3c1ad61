// How many instructions the cases of dispatch_cases.hpp take, counted by callgrind, which this program tells where to count:
//
//   valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file=DIR/out build/bench/instructions
//
// leaves a file for each case and side whose line "totals:" has the number for kCalls calls. tools/bench does it and divides.
#include "dispatch_cases.hpp"

#include <ATen/Parallel.h>

#include <cstdio>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#define CALLGRIND_ZERO_STATS
#define CALLGRIND_DUMP_STATS_AT(name)
#define RUNNING_ON_VALGRIND 0
#endif

namespace {

constexpr int kCalls = 100;

void count(const std::string& name, const std::function<void(bench::Tensors&)>& body, bench::Tensors& tensors) {
  for (int warm_up = 0; warm_up < 10; ++warm_up) body(tensors);
  CALLGRIND_ZERO_STATS;
  for (int i = 0; i < kCalls; ++i) body(tensors);
  CALLGRIND_DUMP_STATS_AT(name.c_str());
}

}  // namespace

int main() {
  if (!RUNNING_ON_VALGRIND) {
    std::puts("this program is run by valgrind's callgrind (and built where its headers are); see the first lines of its source");
    return 2;
  }
  at::set_num_threads(1);
  bench::Tensors tensors(2);
  CALLGRIND_START_INSTRUMENTATION;
  for (const auto& one : bench::cases()) {
    count(one.name + " plain", one.plain, tensors);
    count(one.name + " dtensor", one.distributed, tensors);
  }
  CALLGRIND_STOP_INSTRUMENTATION;
}
