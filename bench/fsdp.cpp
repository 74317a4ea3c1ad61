// The training step of a GPT (width 256, examples/gpt.hpp) on two ranks that are threads, by how parameters are sharded: data parallelism,
// ZeRO-1, ZeRO-2, ZeRO-3 without and with gathering ahead. Counter whole_mb: the most of gathered parameters that was alive on a rank.
#include "main.hpp"
#include "ranks.hpp"

#include "examples/gpt.hpp"

#include <torch/optim/adamw.h>

#include <memory>
#include <optional>

namespace dt = dtensor;

namespace {

constexpr int64_t kVocab = 512, kSeq = 256, kBatch = 8;

void step(benchmark::State& state, const std::optional<dt::FullyShardOptions>& options) {
  double whole = 0;
  bench::on_ranks(state, 2, "threads", [&](dt::World& world) -> std::function<void()> {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {2}, {"dp"});
    auto spmd = std::make_shared<dt::Spmd>(mesh);  // until the last step
    torch::manual_seed(0);
    Gpt model(GptOptions{kVocab, 4, 256, 8, kSeq, 0});
    std::optional<dt::FullyShard> sharded;
    if (options) sharded = dt::fully_shard(*model, mesh, *options);
    auto optimizer = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
    const auto ids = dt::redistribute(torch::randint(kVocab, {kBatch, kSeq + 1}, torch::kLong), {dt::shard(0)});
    return [=, region = std::move(spmd), first = world.rank() == 0, &whole]() mutable {
      const auto loss = gpt_loss(model->forward(ids.slice(1, 0, kSeq)), ids.slice(1, 1, kSeq + 1));
      optimizer->zero_grad();
      loss.backward();
      optimizer->step();
      if (first && sharded) whole = static_cast<double>(sharded->peak_whole_bytes());
    };
  });
  state.counters["whole_mb"] = whole / (1 << 20);
}

[[maybe_unused]] const bool registered = [] {
  dt::FullyShardOptions zero1, zero2, alone, ahead;
  zero1.reduce_at_read = true, zero1.reshard_after_forward = false;
  zero2.reshard_after_forward = false;
  alone.max_whole_units = 1;
  const auto add = [](const char* name, const std::optional<dt::FullyShardOptions>& options) {
    benchmark::RegisterBenchmark(name, step, options)->UseRealTime()->Unit(benchmark::kMillisecond)->MinTime(2);
  };
  add("data_parallel", std::nullopt);
  add("zero1", zero1);
  add("zero2", zero2);
  add("zero3_one_unit", alone);
  add("zero3", ahead);
  return true;
}();

}  // namespace
