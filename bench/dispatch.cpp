// What a DTensor adds to an operator: the time of the operator on a DTensor less that on a plain tensor of the local size, with
// the decision cached, on one thread. Counter overhead_us; mesh sizes 2, 64 and 4096 (fake transport, nothing is sent).
#include "main.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <benchmark/benchmark.h>

#include <chrono>
#include <functional>

namespace dt = dtensor;

namespace {

using Body = std::function<void()>;

double microseconds(const Body& body, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body();
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / calls;
}

// Plain and distributed run in short turns, so that a slow moment of the machine hits both; the fastest of each is what they cost.
void compare(benchmark::State& state, const Body& plain, const Body& distributed, int calls) {
  double best_plain = 1e9, best_distributed = 1e9;
  microseconds(plain, calls), microseconds(distributed, calls);
  for (auto _ : state) {
    best_plain = std::min(best_plain, microseconds(plain, calls));
    const double time = microseconds(distributed, calls);
    best_distributed = std::min(best_distributed, time);
    state.SetIterationTime(time * 1e-6);
  }
  state.counters["plain_us"] = best_plain;
  state.counters["dtensor_us"] = best_distributed;
  state.counters["overhead_us"] = best_distributed - best_plain;
}

struct Tensors {
  explicit Tensors(int64_t ranks)
      : world(dt::comm::make_fake_transport(0, static_cast<int>(ranks))), use(world),
        mesh(dt::init_device_mesh(torch::kCPU, {ranks}, {"dp"})) {
    A = dt::from_local(a, mesh, {dt::shard(0)}, {16 * ranks, 16}).tensor();
    B = dt::from_local(b, mesh, {dt::shard(0)}, {16 * ranks, 16}).tensor();
    W = dt::from_local(b, mesh, {dt::replicate()}, {16, 16}).tensor();
  }

  dt::World world;
  dt::World::Use use;
  dt::DeviceMesh mesh;
  torch::Tensor a = torch::randn({16, 16}), b = torch::randn({16, 16}), A, B, W;
};

template <class Plain, class Distributed>
void op(benchmark::State& state, Plain plain, Distributed distributed) {
  torch::NoGradGuard no_grad;
  Tensors t(state.range(0));
  compare(state, [&] { plain(t); }, [&] { distributed(t); }, 500);
}

#define DTENSOR_BENCH(name, plain, distributed)                                                       \
  void name(benchmark::State& state) {                                                                \
    op(state, [](Tensors& t) { benchmark::DoNotOptimize(plain); }, [](Tensors& t) { benchmark::DoNotOptimize(distributed); }); \
  }                                                                                                   \
  BENCHMARK(name)->Arg(2)->Arg(64)->Arg(4096)->UseManualTime()->Iterations(200)

DTENSOR_BENCH(add, torch::add(t.a, t.b), torch::add(t.A, t.B));
DTENSOR_BENCH(mm, torch::mm(t.a, t.b), torch::mm(t.A, t.W));
DTENSOR_BENCH(relu, torch::relu(t.a), torch::relu(t.A));
DTENSOR_BENCH(sum_dim, t.a.sum(1), t.A.sum(1));
DTENSOR_BENCH(transpose, t.a.t(), t.A.t());
DTENSOR_BENCH(add_, t.a.add_(t.b), t.A.add_(t.B));

void linear_forward_backward(benchmark::State& state) {
  Tensors t(state.range(0));
  torch::nn::Linear plain(16, 16), distributed(nullptr);
  {
    dt::Spmd spmd(t.mesh);
    distributed = torch::nn::Linear(16, 16);
  }
  auto step = [](torch::nn::Linear& module, const torch::Tensor& x) {
    module(x).sum().backward();
    module->zero_grad();
  };
  compare(state, [&] { step(plain, t.a); }, [&] { step(distributed, t.A); }, 50);
}
BENCHMARK(linear_forward_backward)->Arg(2)->Arg(64)->Arg(4096)->UseManualTime()->Iterations(200);

}  // namespace
