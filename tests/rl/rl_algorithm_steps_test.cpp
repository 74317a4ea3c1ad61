// Steps of the trainer by every algorithm, dynamic sampling and how it ends, and options that are refused.
#include "tests/support/rl_trainer_support.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

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

}  // namespace

TEST_CASE("rl trainer: every algorithm takes a step", "[rl]") {
  for (const auto& [name, values] : rl::algorithms()) {
    CAPTURE(name);
    nlohmann::json options{{"algorithm", name}, {"steps", 2}};
    if (name == "vapo") options["critic_warmup"] = 1;
    if (name == "dapo") options["overlong_buffer"] = 2;
    TrainerResult result;
    REQUIRE_NOTHROW(result = trained_alone(options, name == "gdpo" ? task_of_kinds() : trainer_task()));
    CHECK(result.metrics.back().at("actor/grad_norm") > 0);
  }
}

TEST_CASE("rl trainer: greedy answers and kinds of scores and densities are the same on ranks", "[rl]") {
  for (const auto& options : {nlohmann::json{{"algorithm", "remax"}, {"prompts", 6}, {"samples", 2}, {"overlong_buffer", 2}},
                              {{"algorithm", "remax"}, {"prompts", 6}, {"samples", 2}, {"dynamic_sampling", true}},
                              {{"algorithm", "gdpo"}, {"gdpo_weights", {1, 0.5}}},
                              {{"algorithm", "otb"}, {"correction", "token"}, {"microbatch_tokens", 30}},
                              {{"algorithm", "clip_cov"}, {"clip_cov_least", 0.01}, {"minibatches", 2}}}) {
    CAPTURE(options.dump());
    const auto task = options.at("algorithm") == "gdpo" ? task_of_kinds() : trainer_task();
    const auto expected = trained_alone(options, task);
    for (const std::string transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_ranks(
          2, [&](World&) { require_same(trained(options, placed_on(init_device_mesh(c10::kCPU, {2}, {"dp"})), task), expected, 1e-9); },
          transport));
    }
  }
  CHECK_NOTHROW(refuses("the task names none; expected `kinds`", [] { trained_alone({{"algorithm", "gdpo"}}); }));
}

TEST_CASE("rl trainer: a run goes on with the learning rates that it had", "[rl]") {
  const TrainerFolder folder;
  const nlohmann::json falling{{"lr_end", 0.1}, {"steps", 4}};
  const auto expected = trained_alone(falling);
  auto given = falling;
  given["save"] = folder.path / "run";
  given["steps"] = 2;
  given["lr_steps"] = 4;
  trained_alone(given);
  given["resume"] = true;
  given["steps"] = 4;
  given.erase("lr_steps");
  const auto later = trained_alone(given);
  REQUIRE(later.metrics.size() == 2);
  for (size_t i = 0; i < 2; ++i) CHECK(later.metrics[i] == expected.metrics[i + 2]);
  for (const auto& other : {nlohmann::json{{"steps", 9}}, {{"lr_end", 0.5}}}) {
    auto changed = given;
    changed.update(other);
    CAPTURE(changed.dump());
    CHECK_NOTHROW(refuses("learning rates that fall to 0.1 within 4 steps", [&] { trained_alone(changed); }));
  }
  for (const auto& other : {nlohmann::json{{"algorithm", "rloo"}}, {{"seed", 77}}}) {
    auto changed = given;
    changed.update(other);
    CAPTURE(changed.dump());
    CHECK_NOTHROW(refuses("expected the same; hint: another folder, or no resume, for another run", [&] { trained_alone(changed); }));
  }
}

TEST_CASE("rl trainer: groups without a signal are replaced up to a limit", "[rl]") {
  auto task = trainer_task();
  task.verifier = [](const std::string& text, const nlohmann::json&) { return rl::Verdict{.score = text.size() > 3 ? 1.0 : 0.0}; };
  const auto some = trained_alone({{"algorithm", "dapo"}}, task);
  for (const auto& metrics : some.metrics) CHECK(metrics.at("groups/zero_variance") == 0);
  CHECK(some.metrics[0].at("train/num_gen_batches") >= 1);
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
  CHECK_NOTHROW(refuses("none of 18 groups in 3 generations has scores that differ, and none of 72 answers is right", run));
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
