// Plays one rank of a training step of any size without data: what it would take of memory, and what it would send along each mesh
// dimension. Of a pipeline it plays a rank of each stage.
//
//   dry_run --model llama3-8b --mesh dp=32,tp=8 --fsdp --sp
//   dry_run --model llama3-405b --mesh pp=16,dp=128,tp=8 --sp --schedule 1f1b --microbatches 16
#include "expert_choices.hpp"
#include "mesh_option.hpp"
#include "train_options.hpp"
#include "zoo/zoo.hpp"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <c10/util/accumulate.h>
#include <dtensor/comm/fake_transport.hpp>
#include <dtensor/dtensor.hpp>
#include <dtensor/pipeline.hpp>
#include <fmt/format.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <thread>

namespace dt = dtensor;

namespace {

struct Options {
  std::string model = "llama3-8b";
  MeshOption mesh = parse_mesh("dp=32,tp=8", kMeshNames);
  std::string schedule = "1f1b";
  int rank = 0, microbatches = 0, chunks = 0;
  bool fsdp = false, sp = false, operators = false;
  ExpertChoices experts;
  int64_t zero = 3, batch = 1, seq = 2048, steps = 2;
};

constexpr double kMiB = 1 << 20;

// With "pp" first.
std::vector<std::string> mesh_names() {
  auto names = kMeshNames;
  names.insert(names.begin(), "pp");
  names.push_back("ep");
  return names;
}

bool has(const dt::DeviceMesh& mesh, const char* name) { return std::ranges::count(mesh.names(), name) > 0; }

void shard(torch::nn::Module& model, const dt::DeviceMesh& mesh, const Options& o) {
  dt::FullyShardOptions options;
  options.reshard_after_forward = o.zero == 3;
  options.reduce_at_read = o.zero == 1;
  if (o.fsdp) dt::fully_shard(model, has(mesh, "replicas") ? mesh[{"replicas", "dp"}] : mesh["dp"], options);
}

// Tokens over dp and ep, and with --sp along tp.
at::Tensor tokens(const dt::DeviceMesh& mesh, const Options& o) {
  dt::Placements placements;
  int64_t parts = 1;
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    const auto& name = mesh.names()[m];
    const bool batch = name == "dp" || name == "ep" || name == "replicas";
    parts *= batch ? mesh.size(m) : 1;
    placements.push_back(batch ? dt::shard(0) : name == "sp" || (name == "tp" && o.sp) ? dt::shard(1) : dt::replicate());
  }
  return dt::empty({o.batch * parts, o.seq}, mesh, placements, at::device(at::kMeta).dtype(at::kLong)).tensor();
}

// What the last step sent, by mesh dimension and collective.
void print_traffic(const dt::CommDebugMode& traffic) {
  std::map<std::pair<std::string, std::string>, dt::CommDebugMode::Totals> totals;
  for (const auto& [line, sent] : traffic.lines()) {
    const bool between_stages = line.group.find(" to ") != std::string::npos;
    auto& total = totals[{between_stages ? "pp" : line.group, dt::comm::name(line.kind)}];
    total.count += sent.count;
    total.bytes += sent.bytes;
  }
  fmt::print("{:<16} {:<16} {:>8} {:>14}\n", "mesh dimension", "collective", "count", "inputs, MiB");
  for (const auto& [what, total] : totals)
    fmt::print("{:<16} {:<16} {:>8} {:>14.1f}\n", what.first, what.second, total.count, static_cast<double>(total.bytes) / kMiB);
}

int64_t bytes_here(const std::vector<torch::Tensor>& parameters) {
  int64_t bytes = 0;
  for (const auto& p : parameters) {
    bytes += c10::multiply_integers(dt::DTensor(p).layout().local_sizes()) * static_cast<int64_t>(p.element_size());
  }
  return bytes;
}

void print_time(std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  fmt::print("took {:.1f} s\n", took.count());
}

// What one rank of a pipeline found.
struct Stages {
  std::string indices;
  double parameters = 0, peak = 0;  // MiB
};

Stages run_stages(const Options& o, const dt::DeviceMesh& mesh, const dt::PipelineOptions& options, bool prints) {
  const auto own = dt::stage_mesh(mesh);
  const dt::Spmd spmd(own);
  dt::meta_memory();
  std::optional<dt::DeferredInit> deferred(own);
  const auto model = zoo::find(o.model).make();
  deferred.reset();
  set_experts(*model, o.experts, 1.0);
  if (has(own, "tp")) dt::parallelize_module(*model, own, dt::automatic_plan(*model, "tp", true));
  cut_experts(*model, own, o.experts);
  auto pipe = dt::pipeline(*model, mesh, model->pieces(), options);
  for (auto* module : pipe.modules()) shard(*module, own, o);
  pipe.forget_values();
  const auto others = dt::meta_memory().now - bytes_here(pipe.parameters());  // parameters of other stages, which a real run has not
  torch::optim::AdamW optimizer(pipe.parameters(), torch::optim::AdamWOptions(1e-4));
  std::vector<torch::Tensor> inputs, targets;
  for (int i = 0; i < pipe.microbatches(); ++i) {
    inputs.push_back(tokens(own, o));
    targets.push_back(tokens(own, o));
  }
  std::optional<dt::CommDebugMode> traffic;
  for (int64_t step = 0; step < o.steps; ++step) {
    dt::reset_meta_memory_peak();
    traffic.emplace();
    optimizer.zero_grad();
    pipe.step(inputs, targets,
              [&](const torch::Tensor& y, const torch::Tensor& target) { return zoo::loss(y, target) / pipe.microbatches(); });
    optimizer.step();
  }
  if (prints) print_traffic(*traffic);
  if (prints && o.operators) fmt::print("{}\n", traffic->str());
  Stages result{"", static_cast<double>(bytes_here(pipe.parameters())) / kMiB, static_cast<double>(dt::meta_memory().peak - others) / kMiB};
  for (int s = 0; s < pipe.schedule().stages(); ++s) {
    const bool here = pipe.schedule().rank_of_stage[s] == mesh.coordinate(mesh.dim("pp"));
    if (here) result.indices += (result.indices.empty() ? "" : " ") + std::to_string(s);
  }
  return result;
}

// A thread plays each rank of the pipeline that o.rank is in.
void run_pipeline(const Options& o, const dt::PipelineOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto pp = std::ranges::find(o.mesh.names, "pp") - o.mesh.names.begin();
  int64_t stride = 1;
  for (size_t m = pp + 1; m < o.mesh.sizes.size(); ++m) stride *= o.mesh.sizes[m];
  const int64_t ranks = c10::multiply_integers(o.mesh.sizes), count = o.mesh.sizes[pp], own = o.rank / stride % count;
  std::vector<int> played;
  for (int64_t i = 0; i < count; ++i) played.push_back(static_cast<int>(o.rank + (i - own) * stride));
  auto transports = dt::comm::make_fake_transports(played, static_cast<int>(ranks));

  const dt::pipelining::PipelineSize size{.ranks = static_cast<int>(count), .microbatches = options.microbatches, .chunks = options.chunks};
  const auto schedule = dt::pipelining::make_schedule(o.schedule, size);
  fmt::print("{} on {} ({} ranks), {}: {} microbatches of {} x {} tokens in each rank of dp\n", o.model, o.mesh.text, ranks, o.schedule,
             options.microbatches, o.batch, o.seq);
  fmt::print("timeline, a forward of a stage being 1 and a backward 2: {}\n", summary(simulate(schedule)));
  std::vector<Stages> found(count);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      at::set_num_threads(1);
      auto* transport = transports[i].get();
      try {
        dt::World world(std::move(transports[i]));
        const dt::World::Use use(world);
        try {
          found[i] = run_stages(o, dt::init_device_mesh(torch::kCPU, o.mesh.sizes, o.mesh.names), options, i == own);
        } catch (const std::exception& error) {
          transport->leave(error.what());
          throw;
        }
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  fmt::print("{:>4} {:<12} {:>16} {:>28} {:>16}\n", "pp", "stages", "parameters, MiB", "with gradients and AdamW's", "peak of a step");
  for (int64_t i = 0; i < count; ++i) {
    fmt::print("{:>4} {:<12} {:>16.1f} {:>28.1f} {:>16.1f}\n", i, found[i].indices, found[i].parameters, 4 * found[i].parameters,
               found[i].peak);
  }
  print_time(start);
}

void run(const Options& o) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t ranks = c10::multiply_integers(o.mesh.sizes);
  dt::World world(dt::comm::make_fake_transport(o.rank, static_cast<int>(ranks)));
  dt::World::Use use(world);
  const auto mesh = dt::init_device_mesh(torch::kCPU, o.mesh.sizes, o.mesh.names);
  dt::Spmd spmd(mesh);
  dt::meta_memory();
  std::optional<dt::DeferredInit> deferred(mesh);
  const auto model = zoo::find(o.model).make();
  deferred.reset();
  set_experts(*model, o.experts, 1.0);
  if (has(mesh, "tp")) dt::parallelize_module(*model, mesh, dt::automatic_plan(*model, "tp", true));
  cut_experts(*model, mesh, o.experts);
  shard(*model, mesh, o);
  dt::forget_values(*model);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-4));
  const auto input = tokens(mesh, o), target = tokens(mesh, o);
  for (int64_t step = 0; step < o.steps; ++step) {
    dt::reset_meta_memory_peak();
    dt::CommDebugMode traffic;
    optimizer.zero_grad();
    const auto loss = zoo::loss(model->forward(input), target);
    const auto activations = dt::meta_memory().now;
    loss.backward();
    optimizer.step();
    if (step + 1 < o.steps) continue;
    const double parameters = static_cast<double>(bytes_here(model->parameters()));
    fmt::print("{} on {} ({} ranks), rank {}: {} x {} tokens\n", o.model, o.mesh.text, ranks, o.rank, input.size(0), input.size(1));
    fmt::print("parameters      {:>10.1f} MiB, with gradients and AdamW's two states {:.1f} MiB\n", parameters / kMiB,
               4 * parameters / kMiB);
    fmt::print("after forward   {:>10.1f} MiB\n", static_cast<double>(activations) / kMiB);
    fmt::print("peak of a step  {:>10.1f} MiB\n", static_cast<double>(dt::meta_memory().peak) / kMiB);
    print_traffic(traffic);
    if (o.operators) fmt::print("{}\n", traffic.str());
  }
  print_time(start);
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Plays one rank of a training step without data: memory, and traffic per mesh dimension.");
  Options o;
  std::vector<std::string> names;
  for (const auto& entry : zoo::models()) {
    if (entry.is_text()) names.push_back(entry.name);
  }
  app.add_option("--model", o.model, "which")->check(CLI::IsMember(names));
  app.add_option_function<std::string>(
      "--mesh",
      [&o](const std::string& text) {
        try {
          o.mesh = parse_mesh(text, mesh_names());
        } catch (const std::invalid_argument& error) {
          throw CLI::ValidationError(error.what(), CLI::ExitCodes::ValidationError);
        }
      },
      "the mesh, e.g. dp=32,tp=8; its size is the number of ranks");
  app.add_option("--rank", o.rank, "which rank is played");
  auto* fsdp = app.add_flag("--fsdp", o.fsdp, "cut parameters, gradients and optimizer states over dp");
  app.add_option("--zero", o.zero, "with --fsdp: 1, 2 or 3")->check(CLI::Range(1, 3))->needs(fsdp);
  app.add_flag("--sp", o.sp, "sequence parallelism: tp cuts the positions too");
  app.add_flag("--operators", o.operators, "print which operators sent what");
  add_expert_options(app, o.experts);
  app.add_option("--batch", o.batch, "sequences in a step, of each rank of dp and ep")->check(positive);
  app.add_option("--seq", o.seq, "tokens in a sequence")->check(positive);
  app.add_option("--schedule", o.schedule,
                 "with pp in the mesh: in which order a rank works; build/tools/dtensor-schedule --help lists them");
  app.add_option("--microbatches", o.microbatches, "with pp: how many of --batch sequences (default: twice the ranks of pp)")
      ->check(positive);
  app.add_option("--chunks", o.chunks, "with pp: stages of a rank (default: what the schedule has)")->check(positive);
  app.add_option("--steps", o.steps, "steps, of which the last is reported")->check(positive);
  for (auto* option : app.get_options()) option->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  const auto pp = std::ranges::find(o.mesh.names, "pp");
  for (const auto* option : {"--schedule", "--microbatches", "--chunks"}) {
    if (pp == o.mesh.names.end() && app.count(option) > 0)
      throw std::invalid_argument(fmt::format("{} is of a pipeline: add pp to the mesh, as in --mesh pp=2,dp=2", option));
  }
  if (pp == o.mesh.names.end()) return run(o), 0;
  if (o.microbatches == 0) o.microbatches = static_cast<int>(2 * o.mesh.sizes[pp - o.mesh.names.begin()]);
  run_pipeline(o, {.schedule = o.schedule, .microbatches = o.microbatches, .chunks = o.chunks});
} catch (const c10::Error& error) {
  std::fprintf(stderr, "dry_run: %s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "dry_run: %s\n", error.what());
  return 1;
}
