// Trains a model of the zoo on real data over a mesh of ranks, and shows that the losses are those of one device.
//
//   train --ranks 4 --model llama3-debug --mesh dp=2,tp=2 --sp --compare
//   dtensor-run -n 4 train --model vit-debug --mesh dp=4 --log run.jsonl
#include "text_data.hpp"
#include "training.hpp"
#include "zoo/digits.hpp"
#include "zoo/zoo.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/training/clip.hpp>
#include <dtensor/training/lr.hpp>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

namespace dt = dtensor;

namespace {

struct ZooOptions : RunOptions {
  std::string model = "llama3-debug";
  bool sp = false, fsdp = false, traffic = false;
  std::string trace;
  int64_t zero = 3, overlap = 1;
};

// Inputs and targets of a step, plain tensors.
using Batches = std::function<std::pair<torch::Tensor, torch::Tensor>(int64_t step)>;

Batches batches(const ZooOptions& o, const zoo::Entry& entry) {
  if (entry.is_text()) {
    return [&o, text = TextData(o.data)](int64_t step) { return text.batch(o.seed, static_cast<uint64_t>(step), o.batch, o.seq); };
  }
  return [&o, &entry, digits = zoo::Digits(o.data)](int64_t step) {
    auto [images, labels] = digits.batch(o.seed, static_cast<uint64_t>(step), o.batch, entry.channels, entry.image);
    return std::pair(o.dtype == "float64" ? images.to(torch::kFloat64) : images, labels);
  };
}

// Over dp; where there are replicas of that, each is sharded.
void shard_fully(torch::nn::Module& model, const dt::DeviceMesh& mesh, int64_t zero) {
  dt::FullyShardOptions options;
  options.reshard_after_forward = zero == 3;
  options.reduce_at_read = zero == 1;
  const bool replicas = std::ranges::count(mesh.names(), "replicas") > 0;
  dt::fully_shard(model, replicas ? mesh[{"replicas", "dp"}] : mesh["dp"], options);
}

// Of a mesh's dimensions, dp (and replicas) cut the batch; sp, and with --sp tp too, cuts positions of text or rows of images.
dt::Placements placements(const dt::DeviceMesh& mesh, std::optional<int64_t> along, bool over_tp) {
  dt::Placements result;
  for (const auto& name : mesh.names()) {
    const bool cuts = along && (name == "sp" || (name == "tp" && over_tp));
    result.push_back(name == "dp" || name == "replicas" ? dt::shard(0) : cuts ? dt::shard(*along) : dt::replicate());
  }
  return result;
}

// Transformers are cut by pairs of linear layers, ResNeSt by pairs of convolutions.
dt::Plan parameter_plan(const torch::nn::Module& model, const zoo::Entry& entry, const dt::DeviceMesh& mesh) {
  const auto& names = mesh.names();
  if (std::ranges::find(names, "tp") == names.end()) return {};
  if (entry.name.rfind("resnest", 0) != 0) return dt::automatic_plan(model);
  return dt::tensor_parallel({{"layer*.conv2.conv", dt::ColwiseParallel()}, {"layer*.conv3", dt::RowwiseParallel()}});
}

// Trains from the seed and returns the losses. Without a mesh this is plain libtorch on one device; a mesh adds the
// lines that begin with "if (mesh)", and nothing else.
Curve train(const ZooOptions& o, const zoo::Entry& entry, const Batches& batch, const std::optional<dt::DeviceMesh>& mesh,
            const std::string& name, StepLog* log) {
  Curve curve{name, {}};
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);

  torch::manual_seed(o.seed);
  std::optional<dt::DeferredInit> deferred;
  if (mesh) deferred.emplace(*mesh);
  const auto model = entry.make();
  model->to(o.dtype == "float64" ? torch::kFloat64 : torch::kFloat32);
  if (mesh) deferred.reset();
  if (mesh) dt::parallelize_module(*model, *mesh, parameter_plan(*model, entry, *mesh));
  if (mesh && o.fsdp) shard_fully(*model, *mesh, o.zero);
  if (mesh) dt::materialize(*model);
  if (o.compare) curve.initial = whole_parameters(*model);

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(o.lr).betas({0.9, 0.95}));
  dt::lr::Scheduler scheduler(optimizer, learning_rate(o.steps));
  Saved saved(*model, optimizer, scheduler);
  const int64_t first = saved.resume(o);
  const auto [parameters, parameters_here] = count_parameters(*model);
  const std::optional<int64_t> along = entry.is_text() ? 1 : 2, labels_along = entry.is_text() ? std::optional(1) : std::nullopt;
  if (log) log->begin(name, o.steps);
  dt::CommDebugMode traffic;
  std::optional<dt::Trace> trace;
  if (mesh && !o.trace.empty()) trace.emplace(o.trace);
  const dt::OverlapLinear overlap(o.overlap);
  for (int64_t step = first; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    auto [input, target] = batch(step);
    const auto items = static_cast<double>(target.numel());
    if (mesh) input = dt::distribute_tensor(input, *mesh, placements(*mesh, along, o.sp));
    if (mesh) target = dt::distribute_tensor(target, *mesh, placements(*mesh, labels_along, o.sp));

    std::optional<dt::Scope> scope("forward");  // what the trace shows beside operators and collectives
    auto loss = zoo::loss(model->forward(input), target);
    optimizer.zero_grad();
    scope.emplace("backward");
    loss.backward();
    scope.emplace("optimizer");
    const double limit = o.clip > 0 ? o.clip : std::numeric_limits<double>::infinity();
    const double norm = dt::clip_grad_norm_(model->parameters(), limit);
    const double rate = scheduler.rates()[0];
    optimizer.step();
    scope.reset();
    scheduler.step();
    saved.save(o, step + 1);

    curve.loss.push_back(loss.item<double>());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (log) log->add({step, curve.loss.back(), norm, rate, took.count() * 1e3, items / took.count()});
  }
  if (trace) trace->stop();
  if (log) log->end(parameters, parameters_here, traffic.count(), traffic.bytes());
  if (log && mesh && o.traffic) fmt::print("{}\n{}\n", traffic.str(), traffic.module_str());
  return curve;
}

// Refuses options that the run would do nothing with.
void check_use(const CLI::App& app, const ZooOptions& o) {
  const auto has_tp = [](const MeshOption& mesh) { return std::ranges::find(mesh.names, "tp") != mesh.names.end(); };
  const bool tp = std::ranges::any_of(o.meshes, has_tp);
  const auto unused = [&](const std::string& option, bool used, const std::string& why) {
    if (app.count(option) > 0 && !used) throw CLI::ValidationError(option, why);
  };
  const std::string add_tp = "no mesh has a dimension tp: add one, as in --mesh dp=2,tp=2";
  unused("--sp", tp, add_tp);
  unused("--overlap", tp, add_tp);
  unused("--overlap", o.model.rfind("resnest", 0) != 0, o.model + " has no linear layers that tp cuts");
  unused("--trace", o.meshes.size() < 2, "a file has the trace of one mesh");
  unused("--seq", zoo::find(o.model).is_text(), o.model + " takes images, of one size");
}

// Declares the options and reads them. Throws CLI::ParseError, which CLI::App::exit turns into a message and a status.
ZooOptions parse_options(CLI::App& app, int argc, char** argv) {
  ZooOptions o;
  add_run_options(app, o);
  std::vector<std::string> names;
  for (const auto& entry : zoo::models()) names.push_back(entry.name);
  app.add_option("--model", o.model, "which")->check(CLI::IsMember(names));
  app.add_flag("--sp", o.sp, "sequence parallelism: tp cuts the positions of text, or the rows of images, too");
  auto* fsdp = app.add_flag("--fsdp", o.fsdp, "cut parameters, gradients and optimizer states over dp too");
  app.add_option("--zero", o.zero, "with --fsdp: 1 optimizer states, 2 gradients too, 3 parameters too are whole in use only")
      ->check(CLI::Range(1, 3))
      ->needs(fsdp);
  app.add_option("--overlap", o.overlap, "pieces of tensor-parallel layers, which overlap with their collective")
      ->check(CLI::Range(1, 1024));
  app.add_flag("--traffic", o.traffic, "print what the ranks sent, by collective and operator, and by module");
  app.add_option("--trace", o.trace, "write what all ranks did, and when, to this file, for ui.perfetto.dev")->check(can_be_written);
  for (auto* option : app.get_options()) option->capture_default_str();
  app.parse(argc, argv);
  check_use(app, o);
  return o;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Trains a model of the zoo over a mesh of ranks: text on bytes, images on handwritten digits.");
  ZooOptions o;
  try {
    o = parse_options(app, argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  const auto& entry = zoo::find(o.model);
  const auto load = [&]() -> Train {
    return [&o, &entry, batch = batches(o, entry)](const auto& mesh, const std::string& name, StepLog* log) {
      return train(o, entry, batch, mesh, name, log);
    };
  };
  return train_on_meshes(argc, argv, o, load, entry.is_text() ? Units{} : Units{"images", "nats"});
} catch (const std::exception& error) {
  std::fprintf(stderr, "train: %s\n", error.what());
  return 1;
}
