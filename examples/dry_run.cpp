// Plays one rank of a training step of any size without data: what it would take of memory, and what it would send along each mesh
// dimension.
//
//   dry_run --model llama3-8b --mesh dp=32,tp=8 --fsdp --sp
#include "mesh_option.hpp"
#include "train_options.hpp"
#include "zoo/zoo.hpp"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <c10/util/accumulate.h>
#include <dtensor/dtensor.hpp>
#include <fmt/format.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>

namespace dt = dtensor;

namespace {

struct Options {
  std::string model = "llama3-8b";
  MeshOption mesh = parse_mesh("dp=32,tp=8", kMeshNames);
  int rank = 0;
  bool fsdp = false, sp = false, operators = false;
  int64_t zero = 3, batch = 1, seq = 2048, steps = 2;
};

constexpr double kMiB = 1 << 20;

bool has(const dt::DeviceMesh& mesh, const char* name) { return std::ranges::count(mesh.names(), name) > 0; }

void lay_out(torch::nn::Module& model, const dt::DeviceMesh& mesh, const Options& o) {
  if (has(mesh, "tp")) dt::parallelize_module(model, mesh, dt::automatic_plan(model, "tp", true));
  dt::FullyShardOptions options;
  options.reshard_after_forward = o.zero == 3;
  options.reduce_at_read = o.zero == 1;
  if (o.fsdp) dt::fully_shard(model, has(mesh, "replicas") ? mesh[{"replicas", "dp"}] : mesh["dp"], options);
}

// Tokens over dp, and with --sp along tp.
at::Tensor tokens(const dt::DeviceMesh& mesh, const Options& o) {
  dt::Placements placements;
  int64_t parts = 1;
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    const auto& name = mesh.names()[m];
    const bool batch = name == "dp" || name == "replicas";
    parts *= batch ? mesh.size(m) : 1;
    placements.push_back(batch ? dt::shard(0) : name == "sp" || (name == "tp" && o.sp) ? dt::shard(1) : dt::replicate());
  }
  return dt::empty({o.batch * parts, o.seq}, mesh, placements, at::device(at::kMeta).dtype(at::kLong)).tensor();
}

// What the last step sent, by mesh dimension and collective.
void print_traffic(const dt::CommDebugMode& traffic) {
  std::map<std::pair<std::string, std::string>, dt::CommDebugMode::Totals> totals;
  for (const auto& [line, sent] : traffic.lines()) {
    auto& total = totals[{line.group, dt::comm::name(line.kind)}];
    total.count += sent.count;
    total.bytes += sent.bytes;
  }
  fmt::print("{:<16} {:<16} {:>8} {:>14}\n", "mesh dimension", "collective", "count", "inputs, MiB");
  for (const auto& [what, total] : totals)
    fmt::print("{:<16} {:<16} {:>8} {:>14.1f}\n", what.first, what.second, total.count, static_cast<double>(total.bytes) / kMiB);
}

int64_t bytes_here(const torch::nn::Module& model) {
  int64_t bytes = 0;
  for (const auto& p : model.parameters()) {
    bytes += c10::multiply_integers(dt::DTensor(p).layout().local_sizes()) * static_cast<int64_t>(p.element_size());
  }
  return bytes;
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
  lay_out(*model, mesh, o);
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
    const double parameters = static_cast<double>(bytes_here(*model));
    fmt::print("{} on {} ({} ranks), rank {}: {} x {} tokens\n", o.model, o.mesh.text, ranks, o.rank, input.size(0), input.size(1));
    fmt::print("parameters      {:>10.1f} MiB, with gradients and AdamW's two states {:.1f} MiB\n", parameters / kMiB,
               4 * parameters / kMiB);
    fmt::print("after forward   {:>10.1f} MiB\n", static_cast<double>(activations) / kMiB);
    fmt::print("peak of a step  {:>10.1f} MiB\n", static_cast<double>(dt::meta_memory().peak) / kMiB);
    print_traffic(traffic);
    if (o.operators) fmt::print("{}\n", traffic.str());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  fmt::print("took {:.1f} s\n", took.count());
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
  app.add_option_function<std::string>("--mesh", [&o](const std::string& text) {
    try {
      o.mesh = parse_mesh(text, kMeshNames);
    } catch (const std::invalid_argument& error) {
      throw CLI::ValidationError(error.what(), CLI::ExitCodes::ValidationError);
    }
  }, "the mesh, e.g. dp=32,tp=8; its size is the number of ranks");
  app.add_option("--rank", o.rank, "which rank is played");
  auto* fsdp = app.add_flag("--fsdp", o.fsdp, "cut parameters, gradients and optimizer states over dp");
  app.add_option("--zero", o.zero, "with --fsdp: 1, 2 or 3")->check(CLI::Range(1, 3))->needs(fsdp);
  app.add_flag("--sp", o.sp, "sequence parallelism: tp cuts the positions too");
  app.add_flag("--operators", o.operators, "print which operators sent what");
  app.add_option("--batch", o.batch, "sequences in a step, of each rank of dp")->check(positive);
  app.add_option("--seq", o.seq, "tokens in a sequence")->check(positive);
  app.add_option("--steps", o.steps, "steps; the last is reported")->check(positive);
  for (auto* option : app.get_options()) option->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  run(o);
} catch (const c10::Error& error) {
  std::fprintf(stderr, "dry_run: %s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "dry_run: %s\n", error.what());
  return 1;
}
