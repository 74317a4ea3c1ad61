// The training step of a GPT, in tokens per second: one device, data parallel, fully sharded, tensor parallel, a pipeline.
//
//   gpt_step single | ddp | fsdp | tp [--ranks 1] [--dim 256] [--steps 12] [--transport gloo]
//   gpt_step pp --ranks 2 --schedule zbv --microbatches 8
//
// The model, the batch and the optimizer are those of PyTorch's own step beside which this is measured (tools/bench step, pipeline). A
// pipeline's AdamW is dt::optim::FusedAdamW.
#include "gpt.hpp"
#include "train_options.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/optim/fused_adamw.hpp>
#include <dtensor/pipeline.hpp>

#include <CLI/CLI.hpp>
#include <torch/cuda.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <stdexcept>

namespace dt = dtensor;

namespace {

struct Options {
  std::string mode = "single", schedule = "1f1b", device = "cpu";
  int64_t ranks = 1, dim = 256, layers = 4, heads = 8, seq = 256, batch = 8, vocab = 512, steps = 12, microbatches = 1;
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

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// Until the device has done what was issued.
void wait_for(const std::string& device) {
  if (device == "cuda") torch::cuda::synchronize();
}

// The times of the steps, in milliseconds, and the last loss.
std::pair<std::vector<double>, double> run(const Options& o, const std::optional<dt::DeviceMesh>& mesh) {
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);
  torch::manual_seed(0);
  Gpt model(GptOptions{o.vocab, o.layers, o.dim, o.heads, o.seq, 0});
  if (!mesh) model->to(c10::Device(o.device));
  if (mesh) lay_out(model, o.mode, *mesh);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::manual_seed(1);
  auto x = torch::randint(o.vocab, {o.batch, o.seq + 1}, torch::TensorOptions(torch::kLong).device(c10::Device(o.device)));
  auto input = x.slice(1, 0, o.seq), target = x.slice(1, 1, o.seq + 1);
  if (mesh && o.mode != "tp") {
    input = dt::redistribute(input, {dt::shard(0)});
    target = dt::redistribute(target, {dt::shard(0)});
  }
  std::vector<double> times;
  double last = 0;
  for (int64_t step = 0; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    torch::Tensor loss;
    for (int64_t i = 0; i < o.microbatches; ++i) {
      auto part = gpt_loss(model->forward(input.tensor_split(o.microbatches)[i]), target.tensor_split(o.microbatches)[i]);
      if (o.microbatches > 1) part = part / o.microbatches;
      part.backward();
      loss = i == 0 ? part.detach() : loss + part.detach();
    }
    optimizer.step();
    wait_for(o.device);
    times.push_back(milliseconds_since(start));
    if (step + 1 == o.steps) last = loss.item<double>();
  }
  return {times, last};
}

// As many blocks in each stage; the embedding is in the first one, the head in the last.
std::vector<int> cut(const Options& o, int stages) {
  if (o.layers % stages != 0) throw std::invalid_argument(fmt::format("--layers {} do not go into {} stages", o.layers, stages));
  std::vector<int> result(stages, static_cast<int>(o.layers) / stages);
  ++result.front();
  ++result.back();
  return result;
}

// The same of a pipeline.
std::pair<std::vector<double>, double> run_pipeline(const Options& o, const dt::DeviceMesh& mesh) {
  const dt::Spmd spmd(dt::stage_mesh(mesh));
  torch::manual_seed(0);
  Gpt model(GptOptions{o.vocab, o.layers, o.dim, o.heads, o.seq, 0});
  std::vector<dt::Piece> pieces{dt::piece("tokens|positions", [&](const torch::Tensor& ids) { return model->embed(ids); })};
  for (int64_t i = 0; i < o.layers; ++i) {
    pieces.push_back(dt::piece(fmt::format("blocks.{}", i), [&, i](const torch::Tensor& x) { return model->block(i, x); }));
  }
  pieces.push_back(dt::piece("norm|head", [&](const torch::Tensor& x) { return model->score(x); }));

  dt::PipelineOptions options{.schedule = o.schedule, .microbatches = static_cast<int>(o.microbatches)};
  const dt::pipelining::PipelineSize size{.ranks = static_cast<int>(mesh.size(0)), .microbatches = options.microbatches};
  options.cut = cut(o, dt::pipelining::make_schedule(o.schedule, size).stages());
  auto pipe = dt::pipeline(*model, mesh, pieces, options);
  dt::optim::FusedAdamW optimizer(pipe.parameters(), torch::optim::AdamWOptions(1e-3));
  torch::manual_seed(1);
  const auto x = torch::randint(o.vocab, {o.batch, o.seq + 1}, torch::kLong);
  std::vector<double> times;
  double last = 0;
  for (int64_t step = 0; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    last = pipe.step(x.slice(1, 0, o.seq), x.slice(1, 1, o.seq + 1),
                     [&](const torch::Tensor& scores, const torch::Tensor& target) { return gpt_loss(scores, target) / o.microbatches; })
               .loss;
    optimizer.step();
    wait_for(o.device);
    times.push_back(milliseconds_since(start));
  }
  return {times, last};
}

void report(const Options& o, int64_t ranks, std::vector<double> times, double loss) {
  times.erase(times.begin(), times.begin() + std::min<int64_t>(3, o.steps - 1));  // these warm up
  std::ranges::nth_element(times, times.begin() + static_cast<int64_t>(times.size() / 2));
  const double median = times[times.size() / 2];
  const auto mode = o.mode == "pp" ? o.mode + " " + o.schedule : o.mode;
  fmt::print("{} ranks {} dim {}: median step {:.1f} ms, {:.0f} tok/s, loss {:.4f}\n", mode, ranks, o.dim, median,
             static_cast<double>(o.tokens()) / median * 1e3, loss);
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("The training step of a GPT, in tokens per second.");
  Options o;
  std::string transport;
  app.add_option("mode", o.mode, "how the ranks share the work")->check(CLI::IsMember({"single", "ddp", "fsdp", "tp", "pp"}));
  app.add_option("--device", o.device, "cpu, or cuda: a GPU for each rank")->check(is_there);
  app.add_option("--ranks", o.ranks, "as threads of this process, without a launcher")->check(positive);
  app.add_option("--transport", transport, "threads, shm or gloo");
  app.add_option("--dim", o.dim, "width")->check(positive);
  app.add_option("--layers", o.layers, "blocks")->check(positive);
  app.add_option("--heads", o.heads, "attention heads")->check(positive);
  app.add_option("--seq", o.seq, "tokens in a sequence")->check(positive);
  app.add_option("--batch", o.batch, "sequences in a step, over all ranks")->check(positive);
  app.add_option("--vocab", o.vocab, "different tokens")->check(positive);
  app.add_option("--microbatches", o.microbatches, "into how many single and pp cut the batch")->check(positive);
  app.add_option("--schedule", o.schedule, "of pp; build/tools/dtensor-schedule --help lists them");
  app.add_option("--steps", o.steps, "steps, of which three warm up")->check(positive);
  for (auto* option : app.get_options()) option->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (o.dim % o.heads != 0) throw std::invalid_argument(fmt::format("--dim must be a multiple of --heads; got {} and {}", o.dim, o.heads));
  const bool pipeline = o.mode == "pp";
  if (!pipeline && app.count("--schedule")) throw std::invalid_argument("--schedule is for pp");
  if (!pipeline && o.mode != "single" && o.microbatches > 1) throw std::invalid_argument("--microbatches is for single and pp");
  if (o.batch < o.microbatches) throw std::invalid_argument(fmt::format("a batch of {} has no {} microbatches", o.batch, o.microbatches));
  if (o.mode == "single") {
    if (app.count("--ranks")) throw std::invalid_argument("single is a step of one device, and takes no --ranks");
    const auto [times, loss] = run(o, std::nullopt);
    report(o, 1, times, loss);
    return 0;
  }
  return dt::launch(argc, argv, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(c10::Device(o.device).type(), {world.size()}, {pipeline ? "pp" : "ranks"});
    const auto [times, loss] = pipeline ? run_pipeline(o, mesh) : run(o, mesh);
    if (world.rank() == 0) report(o, world.size(), times, loss);
  });
} catch (const std::exception& error) {
  std::fprintf(stderr, "gpt_step: %s\n", error.what());
  return 1;
}
