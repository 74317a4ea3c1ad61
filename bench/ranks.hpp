// Runs a benchmark's loop on ranks that are threads: rank 0 drives it and tells the others when to go on.
#pragma once

#include <dtensor/dtensor.hpp>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace bench {

// `make` builds on every rank what an iteration does; the time is rank 0's.
inline void on_ranks(benchmark::State& state, int ranks, const std::string& transport,
                     const std::function<std::function<void()>(dtensor::World&)>& make, int64_t batch = 1) {
  dtensor::LaunchOptions options;
  options.ranks = ranks;
  options.transport = transport;
  dtensor::launch(options, [&](dtensor::World& world) {
    std::vector<int> everyone(ranks);
    std::iota(everyone.begin(), everyone.end(), 0);
    const auto group = world.transport().connect("bench", everyone);
    const auto yes = at::ones({1}, at::kLong), no = at::zeros({1}, at::kLong);  // plain ones: `make` may open a region
    const auto again = [&](bool more) { return *group->broadcast(more ? yes : no, 0).get().data_ptr<int64_t>() != 0; };
    const auto once = make(world);
    const auto run = [&] {
      for (int64_t i = 0; i < batch; ++i) once();
    };
    run();
    if (world.rank() != 0) {
      while (again(false)) run();
      return;
    }
    while (state.KeepRunningBatch(batch)) {
      state.PauseTiming();
      again(true);
      state.ResumeTiming();
      run();
    }
    again(false);
  });
}

}  // namespace bench
