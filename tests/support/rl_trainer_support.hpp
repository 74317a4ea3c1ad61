// What tests of the trainer share: a small task, a critic, placements, runs and how they are compared.
#pragma once

#include "tests/support/generate_support.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/parallel/plans.hpp>
#include <dtensor/rl/trainer.hpp>

#include <unistd.h>

#include <filesystem>

namespace dtensor::test {

constexpr int64_t kTrainerStop = 0;

// A critic of the same kind: its first score is a value.
struct TrainerCritic : torch::nn::Module {
  TrainerCritic() : body(register_module("body", std::make_shared<SmallText>(5))) {}
  at::Tensor forward(const at::Tensor& ids) { return body->forward(ids).select(2, 0); }
  std::shared_ptr<SmallText> body;
};

using SmallTrainer = rl::Trainer<SmallText, TrainerCritic>;

// To repeat the prompt's first token. Prompts have one to three tokens, and answers end at a stop token.
inline rl::Task trainer_task() {
  rl::Task task;
  const auto prompt = [](int64_t number) {
    rl::Prompt made;
    for (int64_t i = 0; i <= number % 3; ++i) made.tokens.push_back(1 + (7 * number + 3 * i) % (kVocabulary - 1));
    made.truth = std::string(1, static_cast<char>('a' + made.tokens[0]));
    return made;
  };
  task.prompt = prompt;
  task.held_out = [prompt](int64_t number) { return prompt(1000 + number); };
  task.example = [prompt](int64_t number) {
    const auto made = prompt(number);
    return std::pair(made, generate::Tokens{made.tokens[0], made.tokens[0], kTrainerStop});
  };
  task.verifier = [](const std::string& text, const nlohmann::json& truth) {
    const auto count = std::ranges::count(text, truth.get<std::string>()[0]);
    return rl::Verdict{.score = static_cast<double>(count) - 0.1 * static_cast<double>(text.size()), .right = count > 1};
  };
  task.engine.text_of = [](int64_t token) { return std::string(1, static_cast<char>('a' + token)); };
  task.settings.stop_tokens = {kTrainerStop};
  return task;
}

// With two kinds of scores.
inline rl::Task task_of_kinds() {
  auto task = trainer_task();
  task.kinds = {"first", "length"};
  task.verifier = [verifier = task.verifier](const std::string& text, const nlohmann::json& truth) {
    auto verdict = verifier(text, truth);
    verdict.parts = {verdict.score, 0.1 * static_cast<double>(text.size() % 3)};
    return verdict;
  };
  return task;
}

inline nlohmann::json trainer_options(nlohmann::json more) {
  nlohmann::json options{{"steps", 3},  {"prompts", 6}, {"samples", 4},     {"max_tokens", 5},
                         {"lr", 0.003}, {"epochs", 2},  {"eval_prompts", 6}};
  options.update(more);
  return options;
}

struct TrainerResult {
  std::vector<rl::Metrics> metrics;
  std::vector<at::Tensor> parameters;
  double greedy = 0;
};

inline std::vector<at::Tensor> trainer_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  const auto everyone = init_device_mesh(c10::kCPU, {World::current().size()}, {"all"});
  for (const auto& p : module.parameters()) all.push_back(full_tensor(redistribute(p.detach(), everyone, {replicate()})).clone());
  return all;
}

// Without times, which differ.
inline rl::Metrics untimed(const rl::Metrics& metrics) {
  rl::Metrics kept;
  for (const auto& [name, value] : metrics.items()) {
    if (name.rfind("timing_s", 0) != 0 && name != "perf/throughput") kept[name] = value;
  }
  return kept;
}

using TrainerPlaced = rl::Placed<SmallText, TrainerCritic>;

inline TrainerPlaced placed_on(const DeviceMesh& mesh) {
  const bool cuts = std::ranges::count(mesh.names(), "tp") > 0, cuts_positions = std::ranges::count(mesh.names(), "cp") > 0;
  TrainerPlaced placed{.training = mesh,
                       .generation = cuts             ? rl::generation_mesh(mesh, 1)
                                     : cuts_positions ? rl::generation_mesh(mesh, 1, "cp")
                                                      : mesh,
                       .actor = [] { return std::make_shared<SmallText>(); },
                       .critic = [] { return std::make_shared<TrainerCritic>(); }};
  if (cuts) placed.plan = automatic_plan(SmallText()), placed.critic_plan = automatic_plan(TrainerCritic());
  return placed;
}

inline TrainerResult trained(const nlohmann::json& given, const TrainerPlaced& placed, const rl::Task& task = trainer_task()) {
  SmallTrainer trainer(rl::read_options(trainer_options(given)), task, placed);
  TrainerResult result;
  require(trainer.run([&](const rl::Metrics& metrics) { result.metrics.push_back(untimed(metrics)); }), "test", "it was stopped");
  result.greedy = trainer.evaluate();
  result.parameters = trainer_parameters(trainer.actor().model());
  return result;
}

inline void require_same(const TrainerResult& got, const TrainerResult& expected, double bound) {
  require(got.metrics.size() == expected.metrics.size(), "test", "got {} steps", got.metrics.size());
  for (size_t i = 0; i < got.metrics.size(); ++i) {
    for (const auto& [name, value] : expected.metrics[i].items())
      rl_near(got.metrics[i].at(name).get<double>(), value.get<double>(), fmt::format("{} at step {}", name, i), bound);
  }
  rl_near(got.greedy, expected.greedy, "greedy", bound);
  for (size_t i = 0; i < got.parameters.size(); ++i) {
    rl_near(got.parameters[i].reshape({1, -1}), rl_rows(expected.parameters[i].reshape({1, -1})), fmt::format("parameter {}", i), bound);
  }
}

inline TrainerResult trained_alone(const nlohmann::json& given, const rl::Task& task = trainer_task()) {
  TrainerResult result;
  on_ranks(1, [&](World&) { result = trained(given, placed_on(init_device_mesh(c10::kCPU, {1}, {"dp"})), task); });
  return result;
}

struct TrainerFolder {
  TrainerFolder() : path(std::filesystem::temp_directory_path() / fmt::format("dtensor_rl_trainer_{}", getpid())) {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~TrainerFolder() { std::filesystem::remove_all(path); }
  const std::filesystem::path path;
};

inline const nlohmann::json kTrainerPpo{{"algorithm", "ppo"}, {"prompts", 12},   {"samples", 1},
                                        {"minibatches", 2},   {"shuffle", true}, {"kl_target", 0.1}};
inline const nlohmann::json kTrainerGrpo{{"algorithm", "grpo"}, {"kl", "k3_through"}, {"entropy_bonus", 0.01}};

}  // namespace dtensor::test
