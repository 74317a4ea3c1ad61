// Answers of an engine as a batch: seeds, masks and log-probabilities, in one turn and in several with a tool.
#include "tests/support/generate_support.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/entropy.hpp>
#include <dtensor/rl/turns.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

std::string rollout_text(int64_t token) { return std::string(1, static_cast<char>('a' + token)); }

std::vector<rl::Prompt> rollout_prompts(int64_t count) {
  std::vector<rl::Prompt> prompts(count);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k <= i % 3; ++k) prompts[i].tokens.push_back(1 + 7 * (i % 3) + k);
    prompts[i].truth = i;
  }
  return prompts;
}

// So hot that answers differ.
rl::RolloutOptions hot_rollouts(int64_t samples) {
  rl::RolloutOptions options{.samples = samples, .seed = 3, .step = 1};
  options.settings.max_tokens = 12;
  options.settings.temperature = 5;
  options.settings.stop_tokens = {0, 5, 6, 7};
  return options;
}

// Each row's log-probabilities are those of the model, and its mask has as many tokens as it says.
void require_right(const rl::Batch& batch, SmallText& model) {
  const auto ids = batch.get("ids"), mask = batch.get("mask");
  const auto time = ids.size(1);
  const auto logp = rl::token_statistics(model.forward(ids.narrow(1, 0, time - 1)), ids.narrow(1, 1, time - 1)).logp;
  rl_near(batch.get("rollout_logp"), rl_rows(logp.masked_fill(mask.logical_not(), 0)), "log-probabilities", 1e-9);
}

}  // namespace

TEST_CASE("rl rollout: each row has a seed of its own and the log-probabilities of the model", "[rl]") {
  on_ranks(1, [](World&) {
    SmallText model;
    generate::Engine engine(model, {.text_of = rollout_text});
    auto options = hot_rollouts(4);
    const auto batch = rl::rollout(engine, rollout_prompts(5), options, at::kDouble);
    REQUIRE(batch.size() == 20);
    std::set<std::pair<int64_t, int64_t>> seeds;
    const auto own = batch.get("seeds");
    for (int64_t row = 0; row < batch.size(); ++row) seeds.emplace(own[row][0].item<int64_t>(), own[row][1].item<int64_t>());
    CHECK(seeds.size() == 20);
    const auto all = batch.texts("texts");
    CHECK(std::set<std::string>(all.begin(), all.end()).size() > 10);
    CHECK_FALSE(std::equal(all.begin(), all.begin() + 4, all.begin() + 12));  // a prompt that comes twice gets other answers
    CHECK_NOTHROW(require_right(batch, model));
    const auto lengths = batch.meta().at("lengths").get<std::vector<int64_t>>();
    const auto begins = batch.meta().at("prompt_lengths").get<std::vector<int64_t>>();
    for (int64_t row = 0; row < batch.size(); ++row) CHECK(batch.get("mask")[row].sum().item<int64_t>() == lengths[row] - begins[row]);
    options.step = 2;
    CHECK_FALSE(rl::rollout(engine, rollout_prompts(5), options).texts("texts") == all);
    CHECK_NOTHROW(refuses("rl::rollout", [&] { rl::rollout(engine, {}, options); }));
  });
}

TEST_CASE("rl rollout: groups of ranks get what one rank gets", "[rl]") {
  std::vector<std::string> expected;
  const auto run = [](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    SmallText model;
    generate::Engine engine(model, {.text_of = rollout_text});
    return rl::rollout(engine, rollout_prompts(6), hot_rollouts(3)).texts("texts");
  };
  on_ranks(1, [&](World&) { expected = run(init_device_mesh(c10::kCPU, {1}, {"dp"})); });
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CHECK_NOTHROW(on_ranks(
        3, [&](World&) { require(run(init_device_mesh(c10::kCPU, {3}, {"dp"})) == expected, "test", "other texts"); }, transport));
  }
}

TEST_CASE("rl rollout: what a tool says is in no mask and tokens stay as they are", "[rl]") {
  on_ranks(1, [](World&) {
    SmallText model;
    generate::Engine engine(model, {.text_of = rollout_text});
    int64_t asked = 0;
    const rl::Tool tool = [&](const rl::Turn& turn) -> std::optional<rl::Said> {
      ++asked;
      if (turn.truth == 2) fail("test", "the tool is broken");
      if (turn.output.tokens.back() == 0) return {};
      return rl::Said{{20, 21, 22}, "<tool>"};
    };
    const rl::TurnOptions turns{.turns = 3, .tool_tokens = 2};
    const auto batch = rl::rollout_turns(engine, rollout_prompts(4), tool, hot_rollouts(6), turns, at::kDouble);
    CHECK_NOTHROW(require_right(batch, model));
    const auto ids = batch.get("ids"), mask = batch.get("mask");
    const auto lengths = batch.meta().at("lengths").get<std::vector<int64_t>>();
    const auto begins = batch.meta().at("prompt_lengths").get<std::vector<int64_t>>();
    const auto texts = batch.texts("texts");
    int64_t said = 0;
    for (int64_t row = 0; row < batch.size(); ++row) {
      int64_t times = 0, other = 0;
      for (auto at = texts[row].find("<tool>"); at != std::string::npos; at = texts[row].find("<tool>", at + 1)) ++times;
      for (auto t = begins[row]; t < lengths[row]; ++t) {
        const bool own = mask[row][t - 1].item<bool>();
        other += !own;
        if (!own) CHECK((ids[row][t].item<int64_t>() == 20 || ids[row][t].item<int64_t>() == 21));
      }
      CHECK(other == 2 * times);
      CHECK(times <= 2);
      CHECK(lengths[row] - begins[row] <= 12);
      said += times;
    }
    CHECK(said > 3);
    CHECK(asked > said);
    CHECK(batch.meta().at("failed_tools") > 0);
    CHECK_NOTHROW(refuses("got no tool", [&] { rl::rollout_turns(engine, rollout_prompts(1), {}, hot_rollouts(1)); }));
  });
}
