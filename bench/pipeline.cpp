// Schedules of pipelines with stages that sleep: 4 ms in the forward, 4 ms for the gradient of the inputs and 4 ms for that of the
// parameters. Sleeping needs no core, so what is measured is the schedule and what the library adds to it. A sleeper is woken late, by 0.1
// ms and more, so stages sleep a little less and watch the clock for the rest. Names are SCHEDULE/RANKS/MICROBATCHES. Counters:
//   simulated_ms   the milliseconds of a step by the simulator
//   ratio          the measured ones over them
//   own            those of a step without sleep over them: the library's own work
#include "main.hpp"
#include "ranks.hpp"

#include <dtensor/parallel/pipeline/named.hpp>
#include <dtensor/parallel/pipeline/runner.hpp>
#include <dtensor/parallel/pipeline/simulate.hpp>

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace dt = dtensor;
using dt::pipelining::TensorVector;

namespace {

constexpr std::chrono::milliseconds kNap(4);
constexpr std::chrono::microseconds kAwake(200);  // the end of a nap

std::atomic<bool> naps = true;

void nap() {
  if (!naps) return;
  const auto end = std::chrono::steady_clock::now() + kNap;
  std::this_thread::sleep_until(end - kAwake);
  while (std::chrono::steady_clock::now() < end) {
  }
}

// The identity, whose backward sleeps.
struct Sleeps : torch::autograd::Function<Sleeps> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static TensorVector backward(torch::autograd::AutogradContext*, TensorVector gradients) {
    nap();
    return gradients;
  }
};

TensorVector stage(const at::Tensor& weight, const TensorVector& x) {
  nap();
  const auto in = x[0].requires_grad() ? Sleeps::apply(x[0]) : x[0];
  return {in + Sleeps::apply(weight)};
}

// Seconds of a step, the shortest of several: the program's other threads cannot make it shorter.
double seconds_of_step(const dt::pipelining::Schedule& schedule, bool with_naps) {
  naps = with_naps;
  constexpr int kSteps = 4;
  double best = 0;
  std::mutex mutex;
  dt::LaunchOptions options;
  options.ranks = static_cast<int>(schedule.ranks.size());
  dt::launch(options, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(at::kCPU, {options.ranks}, {"pp"});
    const auto own = mesh.slice("pp", world.rank());
    std::vector<dt::pipelining::StageForward> stages;
    for (int s = 0; s < schedule.stages(); ++s) {
      const auto weight = dt::ones({4, 16}, own, {dt::replicate()}).tensor().detach().requires_grad_();
      stages.emplace_back([weight](const TensorVector& x) { return stage(weight, x); });
    }
    dt::pipelining::Runner runner({mesh, "pp"}, schedule, stages);
    const std::vector<TensorVector> inputs(schedule.microbatches, {at::ones({4, 16})});
    for (int step = 0; step < kSteps; ++step) {
      world.barrier();
      const auto start = std::chrono::steady_clock::now();
      runner.step(inputs, [](const TensorVector& y, int) { return y[0].sum(); });
      world.barrier();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      std::lock_guard lock(mutex);
      if (world.rank() == 0 && step > 0) best = best == 0 ? took.count() : std::min(best, took.count());
    }
  });
  return best;
}

void sleep_pipeline(benchmark::State& state, const std::string& name, int ranks, int microbatches) {
  const auto schedule = dt::pipelining::make_schedule(name, {.ranks = ranks, .microbatches = microbatches});
  dt::pipelining::Costs costs;
  costs.stages.assign(schedule.stages(), {4, 4, 4});
  costs.stages[0].input_gradient = 0;  // its inputs need none
  const double simulated = dt::pipelining::simulate(schedule, costs).makespan;
  double seconds = 0;
  for (auto _ : state) state.SetIterationTime(seconds = seconds_of_step(schedule, true));
  state.counters["simulated_ms"] = simulated;
  state.counters["ratio"] = seconds * 1e3 / simulated;
  state.counters["own"] = seconds_of_step(schedule, false) * 1e3 / simulated;
}

const bool registered = [] {
  for (const int ranks : {4, 8}) {
    for (const auto& schedule : dt::pipelining::named_schedules()) {
      const std::string name(schedule.name);
      benchmark::RegisterBenchmark((name + "/" + std::to_string(ranks) + "/" + std::to_string(2 * ranks)).c_str(), sleep_pipeline, name,
                                   ranks, 2 * ranks)
          ->UseManualTime()
          ->Iterations(1)
          ->Unit(benchmark::kMillisecond);
    }
  }
  return true;
}();

}  // namespace
