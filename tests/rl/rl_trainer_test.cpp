// The trainer of docs/rl.md: ranks, parts, packed rows and runs that were cut in two learn what one process learns.
#include "tests/support/rl_trainer_support.hpp"

using namespace dtensor;
using namespace dtensor::test;

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
