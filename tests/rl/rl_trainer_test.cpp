// The trainer of docs/rl.md: ranks, parts, packed rows and runs that were cut in two learn what one process learns.
#include "tests/support/generate_support.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/parallel/plans.hpp>
#include <dtensor/rl/trainer.hpp>

#include <unistd.h>

#include <filesystem>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kTrainerStop = 0;

// A critic of the same kind: its first score is a value.
struct TrainerCritic : torch::nn::Module {
  TrainerCritic() : body(register_module("body", std::make_shared<SmallText>(5))) {}
  at::Tensor forward(const at::Tensor& ids) { return body->forward(ids).select(2, 0); }
  std::shared_ptr<SmallText> body;
};

using SmallTrainer = rl::Trainer<SmallText, TrainerCritic>;

// To repeat the prompt's first token. Prompts have one to three tokens, and answers end at a stop token.
rl::Task trainer_task() {
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

nlohmann::json trainer_options(nlohmann::json more) {
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

std::vector<at::Tensor> trainer_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  const auto everyone = init_device_mesh(c10::kCPU, {World::current().size()}, {"all"});
  for (const auto& p : module.parameters()) all.push_back(full_tensor(redistribute(p.detach(), everyone, {replicate()})).clone());
  return all;
}

// Without times, which differ.
rl::Metrics untimed(const rl::Metrics& metrics) {
  rl::Metrics kept;
  for (const auto& [name, value] : metrics.items()) {
    if (name.rfind("timing_s", 0) != 0 && name != "perf/throughput") kept[name] = value;
  }
  return kept;
}

using TrainerPlaced = rl::Placed<SmallText, TrainerCritic>;

TrainerPlaced placed_on(const DeviceMesh& mesh) {
  const bool cuts = mesh.ndim() == 2;
  TrainerPlaced placed{.training = mesh,
                       .generation = cuts ? rl::generation_mesh(mesh, 1) : mesh,
                       .actor = [] { return std::make_shared<SmallText>(); },
                       .critic = [] { return std::make_shared<TrainerCritic>(); }};
  if (cuts) placed.plan = automatic_plan(SmallText()), placed.critic_plan = automatic_plan(TrainerCritic());
  return placed;
}

TrainerResult trained(const nlohmann::json& given, const TrainerPlaced& placed, const rl::Task& task = trainer_task()) {
  SmallTrainer trainer(rl::read_options(trainer_options(given)), task, placed);
  TrainerResult result;
  require(trainer.run([&](const rl::Metrics& metrics) { result.metrics.push_back(untimed(metrics)); }), "test", "it was stopped");
  result.greedy = trainer.evaluate();
  result.parameters = trainer_parameters(trainer.actor().model());
  return result;
}

void require_same(const TrainerResult& got, const TrainerResult& expected, double bound) {
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

TrainerResult trained_alone(const nlohmann::json& given, const rl::Task& task = trainer_task()) {
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

const nlohmann::json kTrainerPpo{{"algorithm", "ppo"}, {"prompts", 12},   {"samples", 1},
                                 {"minibatches", 2},   {"shuffle", true}, {"kl_target", 0.1}};
const nlohmann::json kTrainerGrpo{{"algorithm", "grpo"}, {"kl", "k3_through"}, {"entropy_bonus", 0.01}};

}  // namespace

TEST_CASE("rl trainer: ranks learn what one process learns", "[rl]") {
  for (const auto& options : {kTrainerGrpo, kTrainerPpo}) {
    const auto expected = trained_alone(options);
    CHECK(expected.metrics[0].at("actor/grad_norm") > 0.01);
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4}, {2, 2}}) {
        CAPTURE(options.dump(), transport, sizes.size());
        const auto names = sizes.size() == 1 ? std::vector<std::string>{"dp"} : std::vector<std::string>{"dp", "tp"};
        REQUIRE_NOTHROW(on_ranks(
            4, [&](World&) { require_same(trained(options, placed_on(init_device_mesh(c10::kCPU, sizes, names))), expected, 1e-9); },
            transport));
      }
    }
  }
}

TEST_CASE("rl trainer: roles on ranks of their own learn what one process learns", "[rl]") {
  const auto expected = trained_alone(kTrainerPpo);
  const auto line = [](std::vector<int> ranks) {
    const auto count = static_cast<int64_t>(ranks.size());
    return DeviceMesh(c10::kCPU, std::move(ranks), {count}, {"dp"});
  };
  for (const std::string transport : {"threads", "gloo"}) {
    CAPTURE(transport);
    CHECK_NOTHROW(on_ranks(
        4,
        [&](World&) {
          auto placed = placed_on(line({1, 2}));
          placed.generation = line({0});
          placed.critic_mesh = line({3});
          require_same(trained(kTrainerPpo, placed), expected, 1e-9);
        },
        transport));
  }
}

TEST_CASE("rl trainer: the loop in eight lines learns what the trainer does", "[rl]") {
  for (const auto& given :
       {nlohmann::json{{"algorithm", "grpo"}}, {{"algorithm", "ppo"}, {"prompts", 12}, {"samples", 1}, {"kl", "none"}}}) {
    CAPTURE(given.dump());
    const auto expected = trained_alone(given);
    REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
      const auto options = rl::read_options(trainer_options(given));
      const auto task = trainer_task();
      const auto placed = placed_on(init_device_mesh(c10::kCPU, {2}, {"dp"}));
      rl::Actor<SmallText> actor(options, placed.training, placed.actor);
      rl::Critic<TrainerCritic> critic(options, placed.training, placed.critic);
      rl::Rollouts<SmallText> rollouts(actor, placed.generation, placed.actor, {}, task.engine);
      rl::Judge judge(placed.training, task.verifier);
      const auto prompts = [&](int64_t step) {
        std::vector<rl::Prompt> all;
        for (int64_t i = 0; i < options.prompts; ++i) all.push_back(task.prompt(step * options.prompts + i));
        return all;
      };
      auto settings = task.settings;
      settings.max_tokens = options.max_tokens;
      for (int64_t step = 0; step < options.steps; ++step) {
        auto batch =
            rollouts.generate(prompts(step), {.settings = settings, .samples = options.samples, .seed = options.seed, .step = step});
        judge.score(batch);
        actor.log_prob(batch, options);
        if (options.has_critic()) critic.values(batch, options);
        actor.advantages(batch, options);
        if (options.has_critic()) critic.update(batch, options, step);
        actor.update(batch, options, step);
        rollouts.update(step + 1);
      }
      const auto got = trainer_parameters(actor.model());
      for (size_t i = 0; i < got.size(); ++i)
        rl_near(got[i].reshape({1, -1}), rl_rows(expected.parameters[i].reshape({1, -1})), "parameters", 1e-9);
    }));
  }
}

TEST_CASE("rl trainer: parts and packed rows change nothing", "[rl]") {
  for (const auto& options : {kTrainerGrpo, kTrainerPpo}) {
    const auto expected = trained_alone(options);
    for (const auto& more : {nlohmann::json{{"microbatch_tokens", 20}}, {{"pack", true}}, {{"pack", true}, {"microbatch_tokens", 30}}}) {
      auto given = options;
      given.update(more);
      CAPTURE(given.dump());
      CHECK_NOTHROW(require_same(trained_alone(given), expected, 1e-9));
      CHECK_NOTHROW(on_ranks(
          2, [&](World&) { require_same(trained(given, placed_on(init_device_mesh(c10::kCPU, {2}, {"dp"}))), expected, 1e-9); },
          "threads"));
    }
  }
}

TEST_CASE("rl trainer: a run that goes on has the same curve bit for bit", "[rl]") {
  for (auto options : {kTrainerGrpo, kTrainerPpo}) {
    options["sft_steps"] = 2;
    options["sft_batch"] = 4;
    options["steps"] = 5;
    const auto expected = trained_alone(options);
    const TrainerFolder folder;
    options["save"] = folder.path / "run";
    options["log"] = folder.path / "log.jsonl";
    auto first = options;
    first["steps"] = 2;
    trained_alone(first);
    options["resume"] = true;
    const auto later = trained_alone(options);
    REQUIRE(later.metrics.size() == 3);
    for (size_t i = 0; i < 3; ++i) CHECK(later.metrics[i] == expected.metrics[i + 2]);
    for (size_t i = 0; i < later.parameters.size(); ++i) CHECK(later.parameters[i].equal(expected.parameters[i]));
    std::ifstream log(folder.path / "log.jsonl");
    int64_t lines = 0;
    for (std::string line; std::getline(log, line); ++lines) CHECK(nlohmann::json::parse(line).at("training/global_step") == lines);
    CHECK(lines == 5);
  }
}

TEST_CASE("rl trainer: every algorithm takes a step", "[rl]") {
  for (const auto& [name, values] : rl::algorithms()) {
    CAPTURE(name);
    nlohmann::json options{{"algorithm", name}, {"steps", 2}};
    if (name == "vapo") options["critic_warmup"] = 1;
    if (name == "dapo") options["overlong_buffer"] = 2;
    TrainerResult result;
    REQUIRE_NOTHROW(result = trained_alone(options));
    CHECK(result.metrics.back().at("actor/grad_norm") > 0);
  }
}

TEST_CASE("rl trainer: groups without a signal are replaced up to a limit", "[rl]") {
  auto task = trainer_task();
  task.verifier = [](const std::string& text, const nlohmann::json&) { return rl::Verdict{.score = text.size() > 3 ? 1.0 : 0.0}; };
  const auto some = trained_alone({{"algorithm", "dapo"}}, task);
  for (const auto& metrics : some.metrics) CHECK(metrics.at("groups/zero_variance") == 0);
  CHECK(some.metrics[0].at("train/num_gen_batches") >= 1);
}

// Every so many prompts have answers that differ; all others are right.
rl::Task nearly_learned_task(int64_t every) {
  auto task = trainer_task();
  task.prompt = [prompt = task.prompt, every](int64_t number) {
    auto made = prompt(number);
    made.truth = every > 0 && number % every == 0;
    return made;
  };
  task.verifier = [](const std::string& text, const nlohmann::json& differs) {
    const bool right = !differs.get<bool>() || text[0] > 'd';
    return rl::Verdict{.score = right ? 1.0 : 0.0, .right = right};
  };
  return task;
}

TEST_CASE("rl trainer: a step learns from the groups that there are after the last generation", "[rl]") {
  const auto task = nearly_learned_task(9);
  const nlohmann::json options{{"algorithm", "dapo"}, {"resamples", 3}, {"samples", 3}, {"minibatches", 4}, {"steps", 2}, {"seed", 4}};
  const auto expected = trained_alone(options, task);
  for (const auto& metrics : expected.metrics) {
    CHECK(metrics.at("groups/signal") == 2);
    CHECK(metrics.at("train/num_gen_batches") == 3);
    CHECK(metrics.at("actor/grad_norm") > 0);
  }
  for (const std::string transport : {"threads", "gloo"}) {
    CAPTURE(transport);
    CHECK_NOTHROW(on_ranks(
        4, [&](World&) { require_same(trained(options, placed_on(init_device_mesh(c10::kCPU, {4}, {"dp"})), task), expected, 1e-9); },
        transport));
  }
}

TEST_CASE("rl trainer: a task that is learned ends the run", "[rl]") {
  const nlohmann::json options{{"algorithm", "dapo"}, {"resamples", 3}};
  for (const std::string transport : {"threads", "gloo"}) {
    CAPTURE(transport);
    CHECK_NOTHROW(on_ranks(
        2,
        [&](World&) {
          SmallTrainer trainer(rl::read_options(trainer_options(options)), nearly_learned_task(0),
                               placed_on(init_device_mesh(c10::kCPU, {2}, {"dp"})));
          require(trainer.run() && trainer.steps() == 0, "test", "it was stopped at step {}", trainer.steps());
          const std::string why =
              "task learned after 0 steps: no group of 18 in 3 generations has scores that differ, and 72 of 72 answers are right";
          require(trainer.why_ended() == why, "test", "got '{}'", trainer.why_ended());
        },
        transport));
  }
  auto task = trainer_task();
  task.verifier = [](const std::string&, const nlohmann::json&) { return rl::Verdict{}; };
  const auto run = [&] { trained_alone(options, task); };
  CHECK_NOTHROW(refuses("step 0: none of 18 groups in 3 generations has scores that differ, and none of 72 answers is right", run));
}

TEST_CASE("rl trainer: a verifier that fails scores 0 and is counted", "[rl]") {
  auto task = trainer_task();
  task.verifier = [](const std::string& text, const nlohmann::json&) {
    require(text.size() != 5, "test", "five");
    return rl::Verdict{.score = text.size() == 1 ? std::nan("") : 1.0};
  };
  const auto result = trained_alone({{"algorithm", "grpo"}}, task);
  CHECK(result.metrics[0].at("reward/failed") > 0);
  CHECK(result.metrics[0].at("critic/score/min") == 0);
}

TEST_CASE("rl trainer: every rank names the role and method and step of a worker that fails", "[rl]") {
  struct Failing : SmallText {
    at::Tensor forward(const at::Tensor& ids) {
      require(!at::GradMode::is_enabled() || World::current().rank() != 1, "test", "no memory");
      return SmallText::forward(ids);
    }
  };
  for (const std::string transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_ranks(
        2,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
          rl::Placed<Failing> placed{.training = mesh, .generation = mesh, .actor = [] { return std::make_shared<Failing>(); }};
          rl::Trainer<Failing> trainer(rl::read_options(trainer_options(nlohmann::json::object())), trainer_task(), placed);
          refuses("actor.update failed at step 0: ", [&] { trainer.run(); });
        },
        transport));
  }
}

TEST_CASE("rl trainer: names that there are not are refused where options were filled in by hand", "[rl]") {
  rl::Options options;
  options.advantage = "grop";
  CHECK_THROWS_WITH(rl::advantages_by(options, {}), says("'advantage' is 'grop'; expected one of"));
  options.loss = "gsop";
  CHECK_THROWS_WITH(rl::policy_loss_by(options, {}, {}), says("'loss' is 'gsop'; expected one of"));
  options.aggregation = "mean";
  CHECK_THROWS_WITH(rl::normalization_by(options, {}), says("'aggregation' is 'mean'; expected one of"));
  CHECK_THROWS_WITH(rl::kl_by(options), says("'kl' is 'none', and a divergence is asked for"));
}
