// Trains a model of the zoo on real data over a mesh of ranks, and shows that the losses are those of one device.
//
//   train --ranks 4 --model llama3-debug --mesh dp=2,tp=2 --sp --compare
//   train --ranks 4 --model llama3-debug --mesh pp=2,dp=2 --schedule zbv --microbatches 8 --compare
//   dtensor-run -n 4 train --model vit-debug --mesh dp=4 --log run.jsonl
#include "expert_choices.hpp"
#include "text_data.hpp"
#include "training.hpp"
#include "zoo/digits.hpp"
#include "zoo/zoo.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/generate/engine.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/pipeline.hpp>
#include <dtensor/training/clip.hpp>
#include <dtensor/training/lr.hpp>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <random>

namespace dt = dtensor;

namespace {

struct ZooOptions : RunOptions {
  std::string model = "llama3-debug";
  bool sp = false, fsdp = false, traffic = false, documents = false;
  std::string trace;
  int64_t zero = 3, overlap = 1;
  std::string schedule = "1f1b", attention = "zigzag";
  int microbatches = 0, chunks = 0;  // 0: what suits
  double dropout = 0;
  int64_t sample_every = 0;  // steps; 0: never
  int neighbours = dt::ContextParallelOptions{}.neighbours;
  ExpertChoices experts;
};

bool has(const dt::DeviceMesh& mesh, const std::string& name) { return std::ranges::find(mesh.names(), name) != mesh.names().end(); }

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
  dt::fully_shard(model, has(mesh, "replicas") ? mesh[{"replicas", "dp"}] : mesh["dp"], options);
}

// How attention computes over positions that cp cuts, by the names of --attention.
const std::map<std::string, dt::ContextParallelOptions> kAttention = {{"ring", {.method = "ring", .order = "contiguous"}},
                                                                      {"zigzag", {.method = "ring", .order = "zigzag"}},
                                                                      {"stripes", {.method = "ring", .order = "stripes"}},
                                                                      {"allgather", {.method = "allgather", .order = "zigzag"}},
                                                                      {"ulysses", {.method = "ulysses", .order = "contiguous"}},
                                                                      {"usp", {.method = "usp", .order = "zigzag"}},
                                                                      {"doublering", {.method = "doublering", .order = "zigzag"}},
                                                                      {"automatic", {.method = "automatic", .order = "zigzag"}},
                                                                      {"tokenring", {.method = "tokenring", .order = "zigzag"}}};

// Attention of positions that cp cuts, or of documents on one device; none where there is neither.
void begin_context(std::optional<dt::ContextParallel>& context, const ZooOptions& o, const std::optional<dt::DeviceMesh>& mesh) {
  const auto cuts_positions = [](const MeshOption& each) { return std::ranges::count(each.names, "cp") > 0; };
  const bool cuts = mesh && has(*mesh, "cp");
  // One device drops what a region drops, which it is compared with.
  const bool compares = o.compare && o.dropout > 0 && std::ranges::any_of(o.meshes, cuts_positions);
  if (!cuts && !o.documents && !compares) return;
  auto options = kAttention.at(o.attention);
  options.neighbours = o.neighbours;
  if (o.documents) options.mask = dt::AttentionMask::causal_documents();
  if (o.documents && options.order == "zigzag") options.order = "balanced";
  const dt::DeviceMesh self(mesh ? mesh->device_type() : c10::Device(o.device).type(), {dt::World::current().rank()}, {1}, {"cp"});
  if (!cuts) options.method = "ring";
  context.emplace(cuts ? *mesh : self, "cp", options);
}

// The documents of a step, of up to half a sequence each.
dt::PackedSequence documents(const ZooOptions& o, int64_t step) {
  std::mt19937_64 random(o.seed * 1'000'003 + static_cast<uint64_t>(step));
  std::vector<int64_t> lengths;
  for (auto left = o.seq; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min<int64_t>(left, 1 + static_cast<int64_t>(random() % static_cast<uint64_t>((o.seq + 1) / 2))));
  }
  return dt::PackedSequence(lengths);
}

// Of a mesh's dimensions, dp, ep and replicas cut the batch; cp and sp, and with --sp tp too, cut positions of text or rows of images.
dt::Placements placements(const dt::DeviceMesh& mesh, std::optional<int64_t> along, bool over_tp) {
  dt::Placements result;
  for (const auto& name : mesh.names()) {
    const bool cuts = along && (name == "sp" || name == "cp" || (name == "tp" && over_tp));
    result.push_back(name == "dp" || name == "ep" || name == "replicas" ? dt::shard(0) : cuts ? dt::shard(*along) : dt::replicate());
  }
  return result;
}

// Transformers are cut by pairs of linear layers, ResNeSt by pairs of convolutions.
dt::Plan parameter_plan(const torch::nn::Module& model, const zoo::Entry& entry, const dt::DeviceMesh& mesh) {
  if (!has(mesh, "tp")) return {};
  if (entry.name.rfind("resnest", 0) != 0) return dt::automatic_plan(model);
  return dt::tensor_parallel({{"layer*.conv2.conv", dt::ColwiseParallel()}, {"layer*.conv3", dt::RowwiseParallel()}});
}

int microbatches(const ZooOptions& o) {
  if (o.microbatches > 0) return o.microbatches;
  int64_t most = 0;  // of ranks of a pipeline
  for (const auto& mesh : o.meshes) {
    for (size_t d = 0; d < mesh.names.size(); ++d) most = std::max(most, mesh.names[d] == "pp" ? mesh.sizes[d] : 0);
  }
  return most > 0 ? static_cast<int>(2 * most) : 1;
}

// A step's microbatches; on a mesh, as they lie there.
struct Microbatches {
  std::vector<torch::Tensor> inputs, targets;

  Microbatches(const ZooOptions& o, const zoo::Entry& entry, const torch::Tensor& input, const torch::Tensor& target,
               const std::optional<dt::DeviceMesh>& mesh, dt::ContextParallel* context)
      : inputs(input.to(c10::Device(o.device)).tensor_split(microbatches(o))),
        targets(target.to(c10::Device(o.device)).tensor_split(microbatches(o))) {
    const std::optional<int64_t> along = entry.is_text() ? 1 : 2, labels_along = entry.is_text() ? std::optional(1) : std::nullopt;
    for (size_t i = 0; mesh && i < inputs.size(); ++i) {
      if (context) inputs[i] = context->order(inputs[i]), targets[i] = context->order(targets[i]);
      inputs[i] = dt::distribute_tensor(inputs[i], *mesh, placements(*mesh, along, o.sp));
      targets[i] = dt::distribute_tensor(targets[i], *mesh, placements(*mesh, labels_along, o.sp));
    }
  }

  torch::Tensor loss(const torch::Tensor& scores, const torch::Tensor& target) const {
    const auto loss = zoo::loss(scores, target);
    return inputs.size() == 1 ? loss : loss / static_cast<double>(inputs.size());
  }
};

// A model, and in a pipeline this rank's stages of it.
struct Learner {
  std::shared_ptr<zoo::Model> model;
  std::optional<dt::Pipeline> pipe = {};

  // Forward and backward of the microbatches, in order, and the sum of their losses.
  double run(const Microbatches& m) {
    const auto loss = [&m](const torch::Tensor& scores, const torch::Tensor& target) { return m.loss(scores, target); };
    if (pipe) return pipe->step(m.inputs, m.targets, loss).loss;
    double sum = 0;
    for (size_t i = 0; i < m.inputs.size(); ++i) {
      std::optional<dt::NoSync> no_sync;  // gradients are reduced once, after the last
      if (i + 1 < m.inputs.size()) no_sync.emplace();
      std::optional<dt::Scope> scope("forward");  // what the trace shows beside operators and collectives
      const auto value = loss(model->forward(m.inputs[i]), m.targets[i]);
      scope.emplace("backward");
      value.backward();
      sum += value.item<double>();
    }
    return sum;
  }

  std::vector<torch::Tensor> parameters() const { return pipe ? pipe->parameters() : model->parameters(); }
  double clip(double limit) const { return pipe ? pipe->clip_grad_norm_(limit) : dt::clip_grad_norm_(parameters(), limit); }
  std::vector<torch::Tensor> whole_parameters() const {
    return pipe ? pipe->gather([](const torch::Tensor& p) { return p.clone(); }) : ::whole_parameters(*model);
  }
  std::vector<torch::Tensor> whole_gradients() const {
    const auto gradient = [](const torch::Tensor& p) { return p.grad().defined() ? p.grad().clone() : torch::Tensor(); };
    return pipe ? pipe->gather(gradient) : ::whole_gradients(*model);
  }
};

// From the seed. A mesh adds the lines that begin with "if (mesh)"; a pipeline lies on `whole`, and its stages on `mesh`.
Learner make(const ZooOptions& o, const zoo::Entry& entry, const std::optional<dt::DeviceMesh>& whole,
             const std::optional<dt::DeviceMesh>& mesh) {
  torch::manual_seed(o.seed);
  std::optional<dt::DeferredInit> deferred;
  if (mesh) deferred.emplace(*mesh);
  Learner learner{entry.make()};
  auto& model = *learner.model;
  model.to(o.dtype == "float64" ? torch::kFloat64 : torch::kFloat32);
  if (o.dropout > 0) model.set_dropout(o.dropout);
  set_experts(model, o.experts, 1.0 / microbatches(o));
  if (mesh) deferred.reset();
  if (mesh) dt::parallelize_module(model, *mesh, parameter_plan(model, entry, *mesh));
  if (mesh) cut_experts(model, *mesh, o.experts);
  if (whole && has(*whole, "pp")) {
    const dt::PipelineOptions options{.schedule = o.schedule, .microbatches = microbatches(o), .chunks = o.chunks};
    learner.pipe = dt::pipeline(model, *whole, model.pieces(), options);
    for (auto* module : learner.pipe->modules()) {
      if (o.fsdp) shard_fully(*module, *mesh, o.zero);
    }
    learner.pipe->materialize();
  } else if (mesh) {
    if (o.fsdp) shard_fully(model, *mesh, o.zero);
    dt::materialize(model);
  }
  return learner;
}

// What the model writes while it trains, in bytes: its own text, after a line's end.
class Samples {
 public:
  Samples(const ZooOptions& o, Learner& learner, bool prints) : o_(o), prints_(prints) {
    if (o.sample_every > 0) engine_.emplace(*learner.model, dt::generate::EngineOptions{.cache_bytes = int64_t{16} << 20});
  }
  void step(int64_t steps) {
    if (!engine_ || steps % o_.sample_every != 0) return;
    engine_->load_weights(steps);
    const auto tokens = std::max<int64_t>(1, std::min<int64_t>(80, o_.seq - 1));
    dt::generate::Settings settings{.temperature = 0.8, .max_tokens = tokens, .seed = o_.seed};
    settings.allowed = [](std::span<const int64_t>, std::vector<bool>& allowed) {
      if (allowed.size() > 256) std::fill(allowed.begin() + 256, allowed.end(), false);
    };
    const auto text = engine_->generate({{'\n'}}, settings)[0].outputs[0].text;
    const auto printed = nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (prints_) fmt::print("sample after {} steps: {}\n", steps, printed);
  }

 private:
  const ZooOptions& o_;
  const bool prints_;
  std::optional<dt::generate::Engine> engine_;
};

// Trains from the seed and returns the losses; without a mesh on one device.
Curve train(const ZooOptions& o, const zoo::Entry& entry, const Batches& batch, const std::optional<dt::DeviceMesh>& whole,
            const std::string& name, StepLog* log) {
  Curve curve{name, {}};
  const auto mesh = whole && has(*whole, "pp") ? dt::stage_mesh(*whole) : whole;
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);
  std::optional<dt::ContextParallel> context;
  begin_context(context, o, mesh);
  auto learner = make(o, entry, whole, mesh);
  if (o.compare) curve.initial = learner.whole_parameters();

  torch::optim::AdamW optimizer(learner.parameters(), torch::optim::AdamWOptions(o.lr).betas({0.9, 0.95}));
  dt::lr::Scheduler scheduler(optimizer, learning_rate(o.steps));
  dt::State state{{"optimizer", optimizer}, {"schedule", scheduler}, {"random", dt::random_streams()}};
  learner.pipe ? state.add({"model", *learner.pipe}) : state.add({"model", *learner.model});
  Saved saved(state, o, mesh.has_value());
  const int64_t first = saved.resume();
  if (log) log->begin(name, o.steps);
  dt::CommDebugMode traffic;
  std::optional<dt::Trace> trace;
  if (mesh && !o.trace.empty()) trace.emplace(o.trace);
  const dt::OverlapLinear overlap(o.overlap);
  std::vector<double> load;  // of experts, in the first and in the last step
  Samples samples(o, learner, log != nullptr);
  for (int64_t step = first; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    const auto [input, target] = batch(step);
    const auto items = static_cast<double>(target.numel());
    if (o.documents) context->pack({documents(o, step)});
    const Microbatches m(o, entry, input, target, mesh, context ? &*context : nullptr);

    optimizer.zero_grad();
    curve.loss.push_back(learner.run(m));
    if (o.compare && step == first) curve.gradients = learner.whole_gradients();
    std::optional<dt::Scope> scope("optimizer");
    const double norm = learner.clip(o.clip > 0 ? o.clip : std::numeric_limits<double>::infinity());
    const double rate = scheduler.rates()[0];
    optimizer.step();
    if (step == first || step + 1 == o.steps) {
      const auto of_step = dt::nn::expert_load(*learner.model);
      load.push_back(most_over_mean(of_step));
      if (log && step + 1 == o.steps) draw_experts(o.experts, of_step);
    }
    dt::nn::update_balance(*learner.model);
    scope.reset();
    scheduler.step();
    const bool goes_on = saved.step(step + 1);

    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (log) log->add({step, curve.loss.back(), norm, rate, took.count() * 1e3, items / took.count()});
    samples.step(step + 1);
    if (!goes_on) break;
  }
  if (trace) trace->stop();
  if (log) log->end(elements(learner.model->parameters()), elements_here(learner.parameters()), traffic.count(), traffic.bytes());
  if (log && has_experts(*learner.model) && !load.empty())
    fmt::print("{}: most tokens of an expert over the mean: {:.3f} at first, {:.3f} at last\n", name, load.front(), load.back());
  if (log && mesh && o.traffic) fmt::print("{}\n{}\n", traffic.str(), traffic.module_str());
  return curve;
}

// Refuses options that the run would do nothing with.
void check_use(const CLI::App& app, const ZooOptions& o) {
  const auto some_mesh_has = [&o](const char* name) {
    return std::ranges::any_of(o.meshes, [name](const MeshOption& mesh) { return std::ranges::count(mesh.names, name) > 0; });
  };
  const bool tp = some_mesh_has("tp"), pp = some_mesh_has("pp"), cp = some_mesh_has("cp");
  const auto unused = [&](const std::string& option, bool used, const std::string& why) {
    if (app.count(option) > 0 && !used) throw CLI::ValidationError(option, why);
  };
  const std::string add_tp = "no mesh has a dimension tp: add one, as in --mesh dp=2,tp=2";
  unused("--sp", tp, add_tp);
  unused("--overlap", tp, add_tp);
  unused("--overlap", o.model.rfind("resnest", 0) != 0, o.model + " has no linear layers that tp cuts");
  unused("--trace", o.meshes.size() < 2, "a file has the trace of one mesh");
  const std::string add_pp = "no mesh has a dimension pp: add one, as in --mesh pp=2,dp=2";
  unused("--schedule", pp, add_pp);
  unused("--chunks", pp, add_pp);
  if (o.batch < microbatches(o))
    throw CLI::ValidationError("--microbatches", fmt::format("{} are more than the {} of --batch", microbatches(o), o.batch));
  unused("--attention", cp, "no mesh has a dimension cp: add one, as in --mesh cp=4");
  const bool has_neighbours = o.attention == "usp" || o.attention == "doublering" || o.attention == "automatic";
  unused("--neighbours", cp && has_neighbours, "goes with a mesh dimension cp and --attention usp, doublering or automatic");
  if (cp && !zoo::find(o.model).is_text())
    throw CLI::ValidationError("--mesh", "cp cuts positions of text, and " + o.model + " takes images");
  unused("--documents", zoo::find(o.model).is_text(), o.model + " takes images");
  unused("--sample-every", zoo::find(o.model).is_text(), o.model + " takes images");
  unused("--sample-every", !pp && !cp, "a model that pp or cp cuts writes no text here");
  for (const auto& mesh : o.meshes) {
    const bool cuts = std::ranges::count(mesh.names, "cp") > 0;
    unused("--documents", cuts, "needs a dimension cp in each mesh: add one, as in --mesh dp=2,cp=2");
  }
  if (pp && !zoo::find(o.model).is_text())
    throw CLI::ValidationError("--mesh", o.model + " has no pieces for pp; models of text have, such as llama3-debug and gpt2-debug");
  check_expert_use(o.model, some_mesh_has("ep"), pp, unused);
  unused("--seq", zoo::find(o.model).is_text(), o.model + " takes images, of one size");
}

// Declares the options and reads them. Throws CLI::ParseError, which CLI::App::exit turns into a message and a status.
ZooOptions parse_options(CLI::App& app, int argc, char** argv) {
  ZooOptions o;
  auto mesh_names = kMeshNames;
  mesh_names.insert(mesh_names.begin(), "pp");
  mesh_names.insert(mesh_names.end(), {"cp", "ep"});
  add_run_options(app, o, mesh_names);
  std::vector<std::string> names;
  for (const auto& entry : zoo::models()) names.push_back(entry.name);
  app.add_option("--model", o.model, "which")->check(CLI::IsMember(names));
  app.add_flag("--sp", o.sp, "sequence parallelism: tp cuts the positions of text, or the rows of images, too");
  std::vector<std::string> methods;
  for (const auto& [name, options] : kAttention) methods.push_back(name);
  app.add_option("--attention", o.attention, "with a mesh dimension cp, which cuts positions: how attention computes over them")
      ->check(CLI::IsMember(methods));
  app.add_option("--neighbours", o.neighbours,
                 "with --attention usp: ranks in a row that trade heads; with doublering: that are close to each other. Divides cp")
      ->check(positive);
  app.add_flag("--documents", o.documents, "each sequence is several documents, of random lengths, which do not see each other");
  auto* fsdp = app.add_flag("--fsdp", o.fsdp, "cut parameters, gradients and optimizer states over dp too");
  app.add_option("--zero", o.zero, "with --fsdp: 1 optimizer states, 2 gradients too, 3 parameters too are whole in use only")
      ->check(CLI::Range(1, 3))
      ->needs(fsdp);
  app.add_option("--overlap", o.overlap, "pieces of tensor-parallel layers, which overlap with their collective")
      ->check(CLI::Range(1, 1024));
  app.add_option("--schedule", o.schedule,
                 "with a mesh dimension pp: in which order a rank works; build/tools/dtensor-schedule --help lists them");
  app.add_option("--microbatches", o.microbatches, "into how many a batch is cut (default: 1, or twice the ranks of pp)")->check(positive);
  app.add_option("--chunks", o.chunks, "with pp: stages of a rank (default: what the schedule has)")->check(positive);
  add_expert_options(app, o.experts);
  app.add_option("--expert-map", o.experts.map, "write a picture of how busy experts were in the last step (SVG)")->check(can_be_written);
  app.add_option("--dropout", o.dropout, "how much of what transformer blocks add is dropped")->check(CLI::Range(0.0, 0.999));
  app.add_option("--sample-every", o.sample_every, "print what the model writes, every so many steps")->check(positive);
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
