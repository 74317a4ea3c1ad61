// Trains a byte-level GPT on real text over a mesh of ranks, and shows that the losses are those of one device.
//
//   train_gpt --ranks 4 --mesh dp=2,tp=2 --compare
//   dtensor-run -n 4 train_gpt --mesh dp=4 --log run.jsonl
#include "gpt.hpp"
#include "text_data.hpp"
#include "training.hpp"

#include <dtensor/dtensor.hpp>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

namespace dt = dtensor;

struct TrainOptions : RunOptions {
  int64_t layers = 2, dim = 128, heads = 4;
  double dropout = 0;
};

// Tensor parallelism as in Megatron: the first linear of a pair is cut along its outputs (heads, hidden units), the
// second along its inputs. All other parameters stay replicated.
static dt::Plan parameter_plan(const dt::DeviceMesh& mesh) {
  const auto& names = mesh.names();
  if (std::ranges::find(names, "tp") == names.end()) return {};
  return dt::tensor_parallel({{"*.q|*.k|*.v|*.up", dt::ColwiseParallel()}, {"*.o|*.down", dt::RowwiseParallel()}});
}

// A batch [batch, seq] is cut into sequences over dp and along them over sp.
static dt::Placements batch_placements(const dt::DeviceMesh& mesh) {
  dt::Placements placements;
  for (const auto& name : mesh.names()) placements.push_back(name == "dp" ? dt::shard(0) : name == "sp" ? dt::shard(1) : dt::replicate());
  return placements;
}

// Trains from the seed and returns the losses. Without a mesh this is plain libtorch on one device; a mesh adds the
// lines that begin with "if (mesh)", and nothing else.
static Curve train(const TrainOptions& o, const TextData& text, const std::optional<dt::DeviceMesh>& mesh, const std::string& name,
                   StepLog* log) {
  Curve curve{name, {}};
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);

  torch::manual_seed(o.seed);
  std::optional<dt::DeferredInit> deferred;
  if (mesh) deferred.emplace(*mesh);
  Gpt model(GptOptions{256, o.layers, o.dim, o.heads, o.seq, o.dropout});
  model->to(o.dtype == "float64" ? torch::kFloat64 : torch::kFloat32);
  if (mesh) deferred.reset();
  if (mesh) dt::parallelize_module(*model, *mesh, parameter_plan(*mesh));
  if (mesh) dt::materialize(*model);
  if (o.compare) curve.initial = whole_parameters(*model);

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(o.lr).betas({0.9, 0.95}));
  dt::lr::Scheduler scheduler(optimizer, learning_rate(o.steps));
  Saved saved({{"model", model}, {"optimizer", optimizer}, {"schedule", scheduler}, {"random", dt::random_streams()}}, o, mesh.has_value());
  const int64_t first = saved.resume();
  if (log) log->begin(name, o.steps);
  dt::CommDebugMode traffic;
  for (int64_t step = first; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    auto [input, target] = text.batch(o.seed, static_cast<uint64_t>(step), o.batch, o.seq);
    for (auto* tokens : {&input, &target}) *tokens = tokens->to(c10::Device(o.device));
    if (mesh) input = dt::distribute_tensor(input, *mesh, batch_placements(*mesh));
    if (mesh) target = dt::distribute_tensor(target, *mesh, batch_placements(*mesh));

    auto loss = gpt_loss(model->forward(input), target);
    optimizer.zero_grad();
    loss.backward();
    const double limit = o.clip > 0 ? o.clip : std::numeric_limits<double>::infinity();
    const double norm = dt::clip_grad_norm_(model->parameters(), limit);
    const double rate = scheduler.rates()[0];
    optimizer.step();
    scheduler.step();
    const bool goes_on = saved.step(step + 1);

    curve.loss.push_back(loss.item<double>());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const double tokens_per_s = static_cast<double>(o.batch * o.seq) / took.count();
    if (log) log->add({step, curve.loss.back(), norm, rate, took.count() * 1e3, tokens_per_s});
    if (!goes_on) break;
  }
  if (log) log->end(elements(model->parameters()), elements_here(model->parameters()), traffic.count(), traffic.bytes());
  return curve;
}

// Declares the options and reads them. Throws CLI::ParseError, which CLI::App::exit turns into a message and a status.
static TrainOptions parse_options(CLI::App& app, int argc, char** argv) {
  TrainOptions o;
  add_run_options(app, o, {"dp", "sp", "tp"});
  app.add_option("--layers", o.layers, "blocks")->check(positive);
  app.add_option("--dim", o.dim, "width")->check(positive);
  app.add_option("--heads", o.heads, "attention heads")->check(positive);
  app.add_option("--dropout", o.dropout, "dropout probability, below 1")->check(CLI::Range(0.0, 0.999));
  for (auto* option : app.get_options()) option->capture_default_str();
  app.parse(argc, argv);
  if (o.dim % o.heads != 0)
    throw CLI::ValidationError("--dim must be a multiple of --heads; got " + std::to_string(o.dim) + " and " +
                                   std::to_string(o.heads), CLI::ExitCodes::ValidationError);
  return o;
}

int main(int argc, char** argv) try {
  CLI::App app("Trains a byte-level GPT on real text over a mesh of ranks.");
  TrainOptions o;
  try {
    o = parse_options(app, argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return train_on_meshes(argc, argv, o, [&o]() -> Train {
    return [&o, text = TextData(o.data)](const auto& mesh, const std::string& name, StepLog* log) {
      return train(o, text, mesh, name, log);
    };
  });
} catch (const std::exception& error) {
  std::fprintf(stderr, "train_gpt: %s\n", error.what());
  return 1;
}
