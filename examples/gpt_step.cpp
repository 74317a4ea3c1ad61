// The training step of a GPT, in tokens per second: one device, data parallel, fully sharded, tensor parallel.
//
//   gpt_step single | ddp | fsdp | tp [--ranks 1] [--dim 256] [--steps 12] [--transport gloo]
//
// The model, the batch and the optimizer are those of PyTorch's own step beside which this is measured (tools/bench step).
#include "gpt.hpp"
#include "train_options.hpp"

#include <dtensor/dtensor.hpp>

#include <CLI/CLI.hpp>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <stdexcept>

namespace dt = dtensor;

namespace {

struct Options {
  std::string mode = "single";
  int64_t ranks = 1, dim = 256, layers = 4, heads = 8, seq = 256, batch = 8, vocab = 512, steps = 12;
  int64_t tokens() const { return batch * seq; }
};

void lay_out(Gpt& model, const std::string& mode, const dt::DeviceMesh& mesh) {
  if (mode == "fsdp") dt::fully_shard(*model, mesh);
  if (mode == "tp") {
    const dt::Plan plan =
        dt::tensor_parallel({{"*.q|*.k|*.v|*.up", dt::ColwiseParallel()}, {"*.o|*.down", dt::RowwiseParallel()}}, "ranks");
    dt::parallelize_module(*model, mesh, plan);
  }
}

// The times of the steps, in milliseconds, and the last loss.
std::pair<std::vector<double>, double> run(const Options& o, const std::optional<dt::DeviceMesh>& mesh) {
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);
  torch::manual_seed(0);
  Gpt model(GptOptions{o.vocab, o.layers, o.dim, o.heads, o.seq, 0});
  if (mesh) lay_out(model, o.mode, *mesh);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::manual_seed(1);
  auto x = torch::randint(o.vocab, {o.batch, o.seq + 1}, torch::kLong);
  auto input = x.slice(1, 0, o.seq), target = x.slice(1, 1, o.seq + 1);
  if (mesh && o.mode != "tp") {
    input = dt::redistribute(input, {dt::shard(0)});
    target = dt::redistribute(target, {dt::shard(0)});
  }
  std::vector<double> times;
  double last = 0;
  for (int64_t step = 0; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    const auto loss = gpt_loss(model->forward(input), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    if (step + 1 == o.steps) last = loss.item<double>();
  }
  return {times, last};
}

void report(const Options& o, int64_t ranks, std::vector<double> times, double loss) {
  times.erase(times.begin(), times.begin() + std::min<int64_t>(3, o.steps - 1));  // these warm up
  std::ranges::nth_element(times, times.begin() + static_cast<int64_t>(times.size() / 2));
  const double median = times[times.size() / 2];
  fmt::print("{} ranks {} dim {}: median step {:.1f} ms, {:.0f} tok/s, loss {:.4f}\n", o.mode, ranks, o.dim, median,
             static_cast<double>(o.tokens()) / median * 1e3, loss);
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("The training step of a GPT, in tokens per second.");
  Options o;
  std::string transport;
  app.add_option("mode", o.mode, "how the ranks share the work")->check(CLI::IsMember({"single", "ddp", "fsdp", "tp"}));
  app.add_option("--ranks", o.ranks, "as threads of this process, without a launcher")->check(positive);
  app.add_option("--transport", transport, "threads, shm or gloo");
  app.add_option("--dim", o.dim, "width")->check(positive);
  app.add_option("--layers", o.layers, "blocks")->check(positive);
  app.add_option("--heads", o.heads, "attention heads")->check(positive);
  app.add_option("--seq", o.seq, "tokens in a sequence")->check(positive);
  app.add_option("--batch", o.batch, "sequences in a step, over all ranks")->check(positive);
  app.add_option("--vocab", o.vocab, "different tokens")->check(positive);
  app.add_option("--steps", o.steps, "steps, of which three warm up")->check(positive);
  for (auto* option : app.get_options()) option->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (o.dim % o.heads != 0) throw std::invalid_argument(fmt::format("--dim must be a multiple of --heads; got {} and {}", o.dim, o.heads));
  if (o.mode == "single") {
    if (app.count("--ranks")) throw std::invalid_argument("single is a step of one device, and takes no --ranks");
    const auto [times, loss] = run(o, std::nullopt);
    report(o, 1, times, loss);
    return 0;
  }
  return dt::launch(argc, argv, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {world.size()}, {"ranks"});
    const auto [times, loss] = run(o, mesh);
    if (world.rank() == 0) report(o, world.size(), times, loss);
  });
} catch (const std::exception& error) {
  std::fprintf(stderr, "gpt_step: %s\n", error.what());
  return 1;
}
