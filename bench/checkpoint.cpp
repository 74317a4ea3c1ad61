// What checkpointing a stack of transformer blocks saves and costs: memory held between forward and backward, and time of both.
// Counters held_MiB (besides parameters and gradients, 24 MiB each) and, as time, a forward and backward.
#include "main.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <benchmark/benchmark.h>

#include <malloc.h>

namespace dt = dtensor;

namespace {

constexpr int64_t kBatch = 4, kSeq = 256, kWidth = 256, kHeads = 4, kBlocks = 8;

struct Block : torch::nn::Module {
  Block()
      : qkv(register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))),
        o(register_module("o", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = qkv(torch::layer_norm(x, {kWidth})).view({kBatch, kSeq, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const auto weights = torch::dropout((parts[0].matmul(parts[1].transpose(-1, -2)) * 0.125).softmax(-1), 0.1, true);
    const auto y = x + o(weights.matmul(parts[2]).transpose(1, 2).reshape({kBatch, kSeq, kWidth}));
    return y + torch::dropout(down(torch::gelu(up(torch::layer_norm(y, {kWidth})))), 0.1, true);
  }
  torch::nn::Linear qkv, o, up, down;
};

enum Way { none, whole, all_but_products };

double held_mib() {
  const auto heap = mallinfo2();
  return static_cast<double>(heap.uordblks + heap.hblkhd) / (1 << 20);
}

void checkpoint(benchmark::State& state) {
  torch::manual_seed(0);
  std::vector<std::shared_ptr<Block>> blocks;
  for (int i = 0; i < kBlocks; ++i) blocks.push_back(std::make_shared<Block>());
  const auto x = torch::randn({kBatch, kSeq, kWidth});
  const dt::CheckpointOptions options{state.range(0) == all_but_products ? dt::matrix_products() : std::vector<std::string>()};
  double held = 0;
  for (auto _ : state) {
    const double before = held_mib();
    auto y = x;
    for (const auto& block : blocks) {
      const auto run = [block](const torch::Tensor& in) { return block->forward(in); };
      y = state.range(0) == none ? run(y) : dt::checkpoint(options, run, y);
    }
    held = held_mib() - before;
    y.sum().backward();
  }
  state.counters["held_MiB"] = held;
}
BENCHMARK(checkpoint)->ArgName("way")->Arg(none)->Arg(whole)->Arg(all_but_products)->Iterations(5)->Unit(benchmark::kMillisecond);

}  // namespace
