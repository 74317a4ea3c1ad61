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

TEST_CASE("rl trainer: several generations on ranks of their own make one batch", "[rl]") {
  const nlohmann::json dapo{{"algorithm", "dapo"}, {"prompts", 6}, {"samples", 4}};
  const auto expected = trained_alone(dapo);
  REQUIRE(expected.metrics[0].at("train/num_gen_batches") > 1);
  for (const std::string transport : {"threads", "shm"}) {
    for (const std::vector<int>& training : {std::vector<int>{2, 1}, {0, 1, 2}}) {
      CAPTURE(transport, training.size());
      CHECK_NOTHROW(on_ranks(
          3,
          [&](World&) {
            const auto count = static_cast<int64_t>(training.size());
            auto placed = placed_on(DeviceMesh(c10::kCPU, training, {count}, {"dp"}));
            placed.generation = DeviceMesh(c10::kCPU, {0}, {1}, {"dp"});
            require_same(trained(dapo, placed), expected, 1e-9);
          },
          transport));
    }
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
    for (const auto& more : {nlohmann::json{{"microbatch_tokens", 20}}, {{"pack", true}}, {{"pack", true}, {"microbatch_tokens", 30}},
                             {{"share_prompts", true}}, {{"share_prompts", true}, {"microbatch_tokens", 30}}}) {
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

TEST_CASE("rl trainer: prompts are shared by whichever of their answers a rank has", "[rl]") {
  auto options = kTrainerGrpo;
  options.update({{"minibatches", 2}, {"shuffle", true}, {"prompts", 5}, {"samples", 4}, {"epochs", 2}, {"sft_steps", 2}});
  const auto expected = trained_alone(options);
  options["share_prompts"] = true;
  CHECK_NOTHROW(require_same(trained_alone(options), expected, 1e-9));
  for (const std::string transport : {"threads", "shm"}) {
    CHECK_NOTHROW(on_ranks(
        4,
        [&](World&) {
          require_same(trained(options, placed_on(init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"}))), expected, 1e-9);
        },
        transport));
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

TEST_CASE("rl trainer: positions that are cut learn what one process learns", "[rl]") {
  auto ppo = kTrainerPpo;
  ppo["microbatch_tokens"] = 30;
  for (const auto& options : {kTrainerGrpo, ppo}) {
    const auto expected = trained_alone(options);
    for (const std::string method : {"ring", "ulysses"}) {
      auto cut = options;
      cut["cp_method"] = method;
      CAPTURE(cut.dump());
      const auto on_mesh = [&](const std::vector<int64_t>& sizes, const std::vector<std::string>& names) {
        require_same(trained(cut, placed_on(init_device_mesh(c10::kCPU, sizes, names))), expected, 1e-9);
      };
      CHECK_NOTHROW(on_ranks(
          2, [&](World&) { on_mesh({2}, {"cp"}); }, "gloo"));
      CHECK_NOTHROW(on_ranks(
          4,
          [&](World&) {
            on_mesh({2, 2}, {"dp", "cp"});
          },
          "threads"));
    }
  }
  CHECK_NOTHROW(on_ranks(2, [&](World&) {
    auto placed = placed_on(init_device_mesh(c10::kCPU, {2}, {"cp"}));
    refuses("'pack' is true, and", [&] { trained({{"pack", true}}, placed); });
    refuses("'share_prompts' is true, and", [&] { trained({{"share_prompts", true}}, placed); });
  }));
}

TEST_CASE("rl trainer: a verifier reads the verdicts that a model writes", "[rl]") {
  auto task = trainer_task();
  task.verifier = [](const std::string& text, const nlohmann::json&) {
    const auto score = static_cast<double>(std::ranges::count_if(text, [](char c) { return c > 'h'; }));
    return rl::Verdict{.score = score, .right = score > 2};
  };
  task.verdicts.settings.max_tokens = 4;
  task.verdicts.ask = [](const generate::Tokens& prompt, const generate::Tokens& answer, const nlohmann::json& truth) {
    generate::Tokens asked(answer);
    asked.push_back(prompt[0]);
    asked.push_back(truth.get<std::string>()[0] - 'a');
    return asked;
  };
  const auto with_writer = [](TrainerPlaced placed) {
    placed.verdicts = [] { return std::make_shared<SmallText>(8); };
    return placed;
  };
  TrainerResult expected;
  on_ranks(1, [&](World&) { expected = trained(kTrainerGrpo, with_writer(placed_on(init_device_mesh(c10::kCPU, {1}, {"dp"}))), task); });
  CHECK(expected.metrics[0].at("critic/score/max") > expected.metrics[0].at("critic/score/min"));
  for (const std::string transport : {"threads", "gloo"}) {
    CAPTURE(transport);
    CHECK_NOTHROW(on_ranks(
        2,
        [&](World&) {
          require_same(trained(kTrainerGrpo, with_writer(placed_on(init_device_mesh(c10::kCPU, {2}, {"dp"}))), task), expected, 1e-9);
        },
        transport));
    CHECK_NOTHROW(on_ranks(
        3,
        [&](World&) {  // on a rank of its own
          auto placed = with_writer(placed_on(DeviceMesh(c10::kCPU, {0, 1}, {2}, {"dp"})));
          placed.verdicts_mesh = DeviceMesh(c10::kCPU, {2}, {1}, {"dp"});
          require_same(trained(kTrainerGrpo, placed, task), expected, 1e-9);
        },
        transport));
  }
}

TEST_CASE("rl verdicts: each is what the model writes of its answer", "[rl]") {
  on_ranks(1, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {1}, {"dp"});
    const auto task = trainer_task();
    SmallText model(8);
    const Spmd spmd(mesh);
    generate::Engine engine(model, task.engine);
    auto batch = rl::rollout(engine, {task.prompt(0), task.prompt(4)}, {.settings = {.max_tokens = 3}, .samples = 2});
    const auto ask = [](const generate::Tokens& prompt, const generate::Tokens& answer, const nlohmann::json&) {
      return generate::Tokens{answer.back(), prompt[0]};
    };
    rl::VerdictOptions options{.ask = ask};
    options.settings.max_tokens = 3;
    rl::VerdictWriter<SmallText> writer(
        mesh, [] { return std::make_shared<SmallText>(8); }, {}, task.engine, options);
    writer.write(batch);
    const auto ids = full_tensor(batch.get("ids"));
    const auto verdicts = batch.texts("verdicts");
    for (int64_t row = 0; row < 4; ++row) {
      const auto length = batch.meta().at("lengths")[row].get<int64_t>();
      const generate::Tokens asked{ids[row][length - 1].item<int64_t>(), ids[row][0].item<int64_t>()};
      require(verdicts[row] == engine.generate({asked}, options.settings)[0].outputs[0].text, "test", "another verdict of row {}", row);
    }
  });
  const rl::WordVerifier words({{"right", 1}, {"not right", -1}, {"partly", 0.5}});
  CHECK(words("partly, no: right", {}).score == 1);
  CHECK(words("partly, no: right", {}).right);
  CHECK(words("that is not right.", {}).score == -1);
  CHECK(words("right or partly", {}).score == 0.5);
  CHECK(words("", {}).score == 0);
}
