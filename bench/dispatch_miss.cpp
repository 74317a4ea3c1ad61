// What the first call of a kind costs: every call has sizes that no call had before, so that each is decided on anew. The time of the
// operator on DTensors of a 2x2x2 mesh less that on plain tensors of the local sizes. Counter miss_us; hit_us is the same calls again.
#include "main.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <benchmark/benchmark.h>

#include <time.h>

#include <functional>

namespace dt = dtensor;
using torch::Tensor;

namespace {

constexpr int kCalls = 200;  // per measurement; their tensors are made before

struct Operands {
  Tensor x, y, weight, bias;  // x, y [rows, columns]; weight [columns, columns]; bias [columns]
  Tensor pending;             // [rows, columns], a sum over tp
};
using Op = std::function<Tensor(const Operands&)>;

// This thread's, which other programs on the machine disturb least.
double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double microseconds(const Op& op, const std::vector<Operands>& operands) {
  std::vector<Tensor> results;
  results.reserve(operands.size());
  const auto start = processor_seconds();
  for (const auto& o : operands) results.push_back(op(o));
  return (processor_seconds() - start) * 1e6 / static_cast<double>(operands.size());
}

int64_t next_rows = 1;  // never used twice, in any benchmark

void first_calls(benchmark::State& state, const Op& op) {
  torch::NoGradGuard no_grad;
  dt::World world(dt::comm::make_fake_transport(0, 8));
  dt::World::Use use(world);
  const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2, 2}, {"dp", "sp", "tp"});
  const dt::Placements rows{dt::shard(0), dt::replicate(), dt::replicate()}, sums{dt::shard(0), dt::replicate(), dt::partial()},
      whole(3, dt::replicate());
  double miss = 1e9, hit = 1e9, plain = 1e9;
  for (auto _ : state) {
    std::vector<Operands> local, distributed;
    for (int i = 0; i < kCalls; ++i) {
      const auto n = next_rows++ % 4000 + 1, c = 8 + next_rows / 4000;
      local.push_back({torch::ones({n, c}), torch::ones({n, c}), torch::ones({c, c}), torch::ones({c}), torch::ones({n, c})});
      const auto& o = local.back();
      distributed.push_back({dt::from_local(o.x, mesh, rows, {2 * n, c}).tensor(), dt::from_local(o.y, mesh, rows, {2 * n, c}).tensor(),
                             dt::from_local(o.weight, mesh, whole, {c, c}).tensor(), dt::from_local(o.bias, mesh, whole, {c}).tensor(),
                             dt::from_local(o.pending, mesh, sums, {2 * n, c}).tensor()});
    }
    plain = std::min({plain, microseconds(op, local), microseconds(op, local)});
    const auto first = microseconds(op, distributed);
    miss = std::min(miss, first - plain);
    hit = std::min(hit, microseconds(op, distributed) - plain);
    state.SetIterationTime(first * 1e-6);
  }
  state.counters["plain_us"] = plain;
  state.counters["miss_us"] = miss;
  state.counters["hit_us"] = hit;
}

#define DTENSOR_BENCH(name, call)                                                                                      \
  void name(benchmark::State& state) { first_calls(state, [](const Operands& o) { return call; }); } \
  BENCHMARK(name)->UseManualTime()->Iterations(10)

DTENSOR_BENCH(add, o.x + o.y);
DTENSOR_BENCH(mul_bias, o.x * o.bias);
DTENSOR_BENCH(mm, o.x.mm(o.weight));
DTENSOR_BENCH(addmm, torch::addmm(o.bias, o.x, o.weight));
DTENSOR_BENCH(sum_dim, o.x.sum(1));
DTENSOR_BENCH(view, o.x.view({-1}));
DTENSOR_BENCH(transpose, o.x.t());
DTENSOR_BENCH(softmax, o.x.softmax(1));
DTENSOR_BENCH(layer_norm, torch::layer_norm(o.x, {o.x.size(1)}, o.bias, o.bias));
DTENSOR_BENCH(add_, o.x.add_(o.y));
DTENSOR_BENCH(cat, torch::cat({o.x, o.y}, 1));
DTENSOR_BENCH(relu_of_pending, torch::relu(o.pending));
DTENSOR_BENCH(add_pending, o.x + o.pending);

}  // namespace
