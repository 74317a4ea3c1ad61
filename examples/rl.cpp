// Learns small tasks by rewards alone: GRPO, PPO and their relatives, on one rank or many.
//
//   rl --task sort4
//   rl --task sort4 --algorithm dapo --seed 1 --log run.jsonl --svg run.svg
//   rl --task sort4 --ranks 4 --mesh dp=2,tp=2 --steps 20
//
// Options of the trainer have the names of rl::Options, with '-' for '_'; --config reads them from a JSON file.
#include "mesh_option.hpp"
#include "rl/plot.hpp"
#include "rl/tasks.hpp"
#include "train_options.hpp"
#include "training.hpp"
#include "zoo/llama3.hpp"

#include <ATen/Parallel.h>
#include <torch/nn/init.h>
#include <dtensor/base/say.hpp>
#include <dtensor/dtensor.hpp>

#include <filesystem>
#include <fstream>
#include <iostream>

namespace dt = dtensor;
namespace rl = dtensor::rl;

namespace {

struct ProgramOptions : RunOptions {
  std::string task = "sort4", config;
  int64_t generation_tp = 0;  // 0: one rank decodes alone
  int64_t dim = 64, layers = 2, heads = 4;
  double init = 1;
  bool quiet = false;
  nlohmann::json given = nlohmann::json::object();  // options of the trainer
};

std::shared_ptr<zoo::Llama3Impl> make_model(const ProgramOptions& o, uint64_t seed) {
  torch::manual_seed(seed);
  zoo::Llama3Options options{.vocabulary = tasks::kVocabulary, .layers = o.layers, .dim = o.dim, .heads = o.heads, .kv_heads = o.heads};
  options.hidden = o.dim * 11 / 4;
  options.rotary = {10000};
  auto model = std::make_shared<zoo::Llama3Impl>(options);
  for (auto& item : model->named_parameters()) {  // in place of 0.02, with which a narrow model hardly begins
    auto& p = item.value();
    if (p.dim() == 2 && item.key() != "output.weight") torch::nn::init::normal_(p, 0, o.init / std::sqrt(static_cast<double>(p.size(1))));
  }
  model->to(o.dtype == "float64" ? torch::kFloat64 : torch::kFloat32);
  return model;
}

// A model whose first score is a value.
struct Values : torch::nn::Module {
  explicit Values(std::shared_ptr<zoo::Llama3Impl> model) : body(register_module("body", std::move(model))) {}
  torch::Tensor forward(const torch::Tensor& ids) { return body->forward(ids).select(2, 0); }
  std::shared_ptr<zoo::Llama3Impl> body;
};

bool has(const dt::DeviceMesh& mesh, const std::string& name) { return std::ranges::count(mesh.names(), name) > 0; }

rl::Placed<zoo::Llama3Impl, Values> place(const ProgramOptions& o, const rl::Options& options, const dt::World& world) {
  const auto mesh = o.meshes.empty() ? dt::init_device_mesh(torch::kCPU, {world.size()}, {"dp"})
                                     : dt::init_device_mesh(torch::kCPU, o.meshes[0].sizes, o.meshes[0].names);
  const auto cut_by = [&](const std::string& name) { return has(mesh, name) && mesh.size(mesh.dim(name)) > 1; };
  const bool cuts = cut_by("tp"), cuts_positions = cut_by("cp");
  auto generation = mesh;
  if (cuts && (cuts_positions || o.generation_tp != mesh.size(mesh.dim("tp"))))
    generation = rl::generation_mesh(mesh, std::max<int64_t>(o.generation_tp, 1));
  else if (cuts_positions) generation = rl::generation_mesh(mesh, 1, "cp");
  rl::Placed<zoo::Llama3Impl, Values> placed{
      .training = mesh, .generation = generation, .actor = [o, options] { return make_model(o, options.seed); }};
  placed.critic = [o, options] { return std::make_shared<Values>(make_model(o, options.seed + 1)); };
  if (cuts) {
    placed.plan = dt::automatic_plan(*make_model(o, 0));
    placed.critic_plan = dt::automatic_plan(Values(make_model(o, 0)));
  }
  return placed;
}

void run(const ProgramOptions& o, const rl::Options& options, const dt::World& world) {
  const bool says = world.rank() == 0;
  rl::Trainer<zoo::Llama3Impl, Values> trainer(options, tasks::task(o.task, options.seed), place(o, options, world));
  int64_t parameters = 0;
  for (const auto& p : trainer.actor().model().parameters()) parameters += p.numel();
  if (says) fmt::print("{} by {}: {} parameters, {} ranks, seed {}\n", o.task, options.algorithm, parameters, world.size(), options.seed);
  if (!options.resume) trainer.imitate();
  const auto before = trainer.evaluate();
  std::vector<rl::Metrics> curves;
  const bool ended = trainer.run([&](const rl::Metrics& metrics) {
    curves.push_back(metrics);
    if (!says || o.quiet) return;
    fmt::print("{}\n", rl::line_of(metrics));
    std::fflush(stdout);
  });
  if (says && !o.svg.empty()) write_metrics_plot(o.svg, curves);
  if (!ended) return;
  if (says && !trainer.why_ended().empty()) fmt::print("{}\n", trainer.why_ended());
  const auto after = trainer.evaluate();
  if (says) fmt::print("reward: greedy exact {:.4f} over {} held-out prompts (before {:.4f})\n", after, options.eval_prompts, before);
}

std::string not_negative(const std::string& number) { return number.starts_with('-') ? "got " + number + "; expected 0 or more" : ""; }

std::string dashed(std::string name) {
  std::ranges::replace(name, '_', '-');
  return name;
}

template <class T>
void add_field(CLI::App& app, ProgramOptions& o, const char* name, const T& field, const char* help) {
  const auto take = [&o, name = std::string(name)](const T& value) { o.given[name] = value; };
  if constexpr (std::is_same_v<T, bool>) {
    const auto flag = "--" + dashed(name) + ",!--no-" + dashed(name);
    app.add_flag_function(
        flag, [take](int64_t times) { take(times > 0); }, help);
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    app.add_option_function<T>("--" + dashed(name), take, help)->delimiter(',');
  } else {
    auto* option = app.add_option_function<T>("--" + dashed(name), take, help)->default_str(fmt::format("{}", field));
    if constexpr (std::is_unsigned_v<T>) option->check(not_negative);
  }
}

rl::Options parse_options(CLI::App& app, ProgramOptions& o, int argc, char** argv) {
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  std::vector<std::string> names;
  for (const auto& [name, recipe] : tasks::recipes()) names.push_back(name);
  app.add_option("--task", o.task, "what is learned")->check(CLI::IsMember(names));
  add_mesh_options(app, o, {"dp", "cp", "tp"});
  app.add_option("--generation-tp", o.generation_tp, "ranks that decode a prompt together, where --mesh has tp; others share prompts out")
      ->check(not_negative);
  app.add_option("--config", o.config, "a JSON file with options of the trainer")->check(CLI::ExistingFile);
  app.add_option("--dim", o.dim, "width of the model")->check(positive);
  app.add_option("--layers", o.layers, "of the model")->check(positive);
  app.add_option("--heads", o.heads, "of the model")->check(positive);
  app.add_option("--init", o.init, "of the first weights: their standard deviation times the root of the inputs")->check(positive);
  app.add_option("--dtype", o.dtype, "of the parameters")->check(CLI::IsMember({"float32", "float64"}));
  app.add_option("--svg", o.svg, "a file for a picture of the curves")->check(can_be_written);
  app.add_flag("--quiet", o.quiet, "only the first line and the last");
  rl::Options defaults;
  rl::for_each_option(defaults, [&](const char* name, auto& field, const char* help) { add_field(app, o, name, field, help); });
  add_launch_options(app);
  app.parse(argc, argv);
  auto chosen = o.config.empty() ? nlohmann::json::object() : nlohmann::json::parse(std::ifstream(o.config));
  dt::require(chosen.is_object(), "rl", "'{}' holds no JSON object; expected one of options of the trainer", o.config);
  chosen.update(o.given);
  auto given = tasks::recipes().at(o.task).options;
  const auto named = rl::algorithms().find(chosen.value("algorithm", ""));  // its own values go before the task's
  if (named != rl::algorithms().end()) given.update(named->second);
  given.update(chosen);
  return rl::read_options(given);
}

// Now, not after the last step.
void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  dt::require(!error, "rl", "'{}' cannot be made: {}; hint: --save names a folder for checkpoints", folder, error.message());
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Learns small tasks by rewards alone.");
  ProgramOptions o;
  rl::Options options;
  try {
    options = parse_options(app, o, argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  if (!options.save.empty()) make_folder(options.save);
  at::set_num_threads(1);
  return launch_on(argc, argv, o.meshes, [&](dt::World& world) { run(o, options, world); });
} catch (const std::exception& error) {
  const auto* ours = dynamic_cast<const dt::Error*>(&error);
  std::fprintf(stderr, "rl: %s\n", ours ? ours->what_without_backtrace() : error.what());
  return 1;
}
