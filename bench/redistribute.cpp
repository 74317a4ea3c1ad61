// Moving a tensor between layouts: what each transition takes on ranks that are threads, by the bytes of the whole tensor. The plan is
// cached, the result waited for.
#include "main.hpp"
#include "ranks.hpp"

#include <ATen/ops/randn.h>

#include <string>
#include <vector>

namespace dt = dtensor;

namespace {

struct Transition {
  std::string name;
  dt::Placements from, to;
};

// Flat cuts are in equal pieces, which depend on the sizes.
dt::Placements fitted(dt::Placements placements, int64_t elements, int ranks) {
  if (placements[0].is_flat()) placements[0] = dt::flat(elements / ranks);
  return placements;
}

void move(benchmark::State& state, const Transition& transition) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t rows = state.range(1) / 4 / 256;
  const auto from = fitted(transition.from, rows * 256, ranks), to = fitted(transition.to, rows * 256, ranks);
  bench::on_ranks(state, ranks, "threads", [&](dt::World&) -> std::function<void()> {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {ranks}, {"ranks"});
    const auto whole = at::randn({rows, 256});
    const auto x = from[0].is_partial() ? dt::from_local(whole, mesh, from)
                                        : dt::distribute_tensor(whole, mesh, {dt::replicate()}).redistribute(from);
    return [x, to] { x.redistribute(to).to_local(); };
  });
  state.SetBytesProcessed(state.iterations() * state.range(1));
}

[[maybe_unused]] const bool registered = [] {
  const std::vector<Transition> transitions{
      {"S0->R", {dt::shard(0)}, {dt::replicate()}},         {"S1->R", {dt::shard(1)}, {dt::replicate()}},
      {"S0->S1", {dt::shard(0)}, {dt::shard(1)}},           {"R->S0", {dt::replicate()}, {dt::shard(0)}},
      {"P->R", {dt::partial()}, {dt::replicate()}},         {"P->S0", {dt::partial()}, {dt::shard(0)}},
      {"P->S1", {dt::partial()}, {dt::shard(1)}},           {"F->R", {dt::flat(1)}, {dt::replicate()}},
      {"P->F", {dt::partial()}, {dt::flat(1)}},
  };
  for (const auto& transition : transitions) {
    benchmark::RegisterBenchmark(transition.name.c_str(), move, transition)
        ->ArgNames({"ranks", "bytes"})
        ->ArgsProduct({{2, 4}, {64 << 10, 16 << 20}})
        ->UseRealTime()
        ->MinTime(0.1)
        ->Unit(benchmark::kMicrosecond);
  }
  return true;
}();

}  // namespace
