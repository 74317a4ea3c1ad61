// The training step of a GPT (examples/gpt.hpp) on a mesh of one rank beside the same on plain tensors, in turns: what it costs to be
// ready for many devices. Counter ratio, the median of the pairs; width 64 and 256.
#include "main.hpp"

#include "examples/gpt.hpp"

#include <dtensor/dtensor.hpp>

#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

namespace dt = dtensor;

namespace {

constexpr int64_t kVocab = 512, kSeq = 256, kBatch = 8;

// A model, its optimizer and a batch, distributed or not.
class Trainer {
 public:
  Trainer(int64_t dim, std::optional<dt::DeviceMesh> mesh) : mesh_(std::move(mesh)) {
    std::optional<dt::Spmd> spmd;
    if (mesh_) spmd.emplace(*mesh_);
    torch::manual_seed(0);
    model_ = Gpt(GptOptions{kVocab, 4, dim, 8, kSeq, 0});
    optimizer_.emplace(model_->parameters(), torch::optim::AdamWOptions(1e-3));
    ids_ = torch::randint(kVocab, {kBatch, kSeq + 1}, torch::kLong);
  }

  double milliseconds() {
    std::optional<dt::Spmd> spmd;
    if (mesh_) spmd.emplace(*mesh_);
    const auto start = std::chrono::steady_clock::now();
    const auto loss = gpt_loss(model_->forward(ids_.slice(1, 0, kSeq)), ids_.slice(1, 1, kSeq + 1));
    optimizer_->zero_grad();
    loss.backward();
    optimizer_->step();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  std::optional<dt::DeviceMesh> mesh_;
  Gpt model_{nullptr};
  std::optional<torch::optim::AdamW> optimizer_;
  torch::Tensor ids_;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void mesh_of_one(benchmark::State& state) {
  dt::LaunchOptions options;
  dt::launch(options, [&](dt::World&) {
    Trainer plain(state.range(0), std::nullopt), distributed(state.range(0), dt::init_device_mesh(torch::kCPU, {1}, {"dp"}));
    for (int warm_up = 0; warm_up < 3; ++warm_up) plain.milliseconds(), distributed.milliseconds();
    std::vector<double> without, with, ratios;
    for (auto _ : state) {
      const bool plain_first = ratios.size() % 2 == 0;
      if (plain_first) without.push_back(plain.milliseconds());
      with.push_back(distributed.milliseconds());
      if (!plain_first) without.push_back(plain.milliseconds());
      ratios.push_back(with.back() / without.back());
      state.SetIterationTime(with.back() * 1e-3);
    }
    state.counters["plain_ms"] = median(without);
    state.counters["dtensor_ms"] = median(with);
    state.counters["ratio"] = median(ratios);
  });
}
BENCHMARK(mesh_of_one)->ArgName("dim")->Arg(64)->Iterations(60)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(mesh_of_one)->ArgName("dim")->Arg(256)->Iterations(15)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
