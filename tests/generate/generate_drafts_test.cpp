// Guesses: no token changes, and fewer passes are needed.
#include "tests/support/generate_support.hpp"

#include <dtensor/generate/drafters.hpp>

using namespace dtensor;
using namespace dtensor::test;
using generate::Draft;
using generate::Engine;
using generate::EngineOptions;
using generate::Settings;
using generate::Tokens;

namespace {

// Guesses at random: a tree in which some are right.
struct RandomDrafter final : generate::Drafter {
  explicit RandomDrafter(bool chains) : chains(chains) {}
  std::vector<std::vector<Draft>> propose(const std::vector<generate::DraftContext>& outputs) override {
    std::vector<std::vector<Draft>> all;
    for (const auto& output : outputs) {
      auto& drafts = all.emplace_back();
      for (int64_t i = 0; i < output.most; ++i) {
        const auto parent = chains ? i - 1 : static_cast<int64_t>(random() % static_cast<uint64_t>(i + 1)) - 1;
        drafts.push_back({static_cast<int64_t>(random() % kVocabulary), parent});
      }
    }
    return all;
  }
  std::mt19937_64 random{3};
  bool chains;
};

std::vector<Draft> drafts_of(generate::Drafter& drafter, const Tokens& tokens, int64_t prompt, int64_t most) {
  const Settings settings;
  return drafter.propose({{tokens, prompt, settings, 0, most}})[0];
}

Tokens tokens_of(const std::vector<Draft>& drafts) {
  Tokens tokens;
  for (const auto& draft : drafts) tokens.push_back(draft.token);
  return tokens;
}

// Tokens for each pass that an output took part in.
double tokens_a_pass(const Engine& engine) {
  return static_cast<double>(engine.counts().tokens) / static_cast<double>(engine.counts().sequence_passes);
}

}  // namespace

TEST_CASE("generate drafts: no guess changes a token", "[generate]") {
  SmallText model, smaller(11);
  const auto prompts = some_prompts(6, 3);
  for (const auto& settings :
       {Settings{.temperature = 0, .max_tokens = 24}, Settings{.temperature = 0.8, .top_p = 0.9, .max_tokens = 24, .seed = 9, .n = 3}}) {
    std::vector<std::vector<generate::Output>> expected;
    for (const auto& prompt : prompts) {
      auto& outputs = expected.emplace_back();
      for (int64_t i = 0; i < settings.n; ++i) outputs.push_back(decode_slowly(model, prompt, settings, i));
    }
    const auto check = [&](const char* name, const std::shared_ptr<generate::Drafter>& drafter, int64_t drafts,
                           EngineOptions options = {}) {
      CAPTURE(name, drafts, settings.temperature);
      options.drafter = drafter;
      options.drafts = drafts;
      Engine engine(model, options);
      for (int round = 0; round < 2; ++round) {
        const auto got = engine.generate(prompts, settings);
        for (size_t i = 0; i < prompts.size(); ++i) {
          for (int64_t k = 0; k < settings.n; ++k) REQUIRE_NOTHROW(require_same(got[i].outputs[k], expected[i][k], name));
        }
      }
      CHECK(engine.blocks_unused() == engine.blocks());
      return tokens_a_pass(engine);
    };
    check("n-grams", std::make_shared<generate::NgramDrafter>(), 5);
    check("random chains", std::make_shared<RandomDrafter>(true), 4);
    check("random trees", std::make_shared<RandomDrafter>(false), 12);
    check("random trees in chunks", std::make_shared<RandomDrafter>(false), 12, {.tokens_per_step = 9, .chunk = 6});
    check("a smaller model", std::make_shared<generate::DraftModel>(smaller), 3);
    CHECK(check("the model itself", std::make_shared<generate::DraftModel>(model), 3) > 3);
    CHECK(check("earlier outputs", std::make_shared<generate::RolloutTrees>(), 16) > 1.5);
    SmallText model_of_few;
    Engine measure(model_of_few);
    check("little room", std::make_shared<RandomDrafter>(false), 8, {.cache_bytes = 5 * measure.runner().bytes_of_block()});
  }
}

TEST_CASE("generate drafts: guesses after a prompt of one token that several outputs share", "[generate]") {
  SmallText model;
  const Settings settings{.temperature = 0.8, .max_tokens = 30, .seed = 4, .n = 4};
  Engine engine(model, {.drafter = std::make_shared<generate::RolloutTrees>(), .drafts = 40});
  for (int round = 0; round < 3; ++round) {
    const auto got = engine.generate({{5}}, settings)[0];
    for (int64_t k = 0; k < settings.n; ++k) require_same(got.outputs[k], decode_slowly(model, {5}, settings, k), "one token");
  }
}

TEST_CASE("generate drafts: the second epoch of the same prompts needs few passes", "[generate]") {
  SmallText model;
  const auto prompts = some_prompts(8, 3);
  auto trees = std::make_shared<generate::RolloutTrees>();
  Engine engine(model, {.drafter = trees, .drafts = 16});
  Settings settings{.temperature = 0.2, .max_tokens = 40, .seed = 1, .n = 4};  // of low entropy
  engine.generate(prompts, settings);
  const auto before = engine.counts();
  settings.seed = 2;
  engine.generate(prompts, settings);
  const auto after = engine.counts();
  const auto ratio =
      static_cast<double>(after.tokens - before.tokens) / static_cast<double>(after.sequence_passes - before.sequence_passes);
  CAPTURE(ratio);
  CHECK(ratio >= 2);
  CHECK(trees->prompts() == 8);
}

TEST_CASE("generate drafts: n-grams of a text that repeats itself", "[generate]") {
  generate::NgramDrafter drafter;
  CHECK(tokens_of(drafts_of(drafter, {1, 2, 3, 4, 1, 2}, 1, 3)) == Tokens{3, 4, 1});
  CHECK(tokens_of(drafts_of(drafter, {5, 5}, 1, 3)) == Tokens{5, 5, 5});
  CHECK(tokens_of(drafts_of(drafter, {9, 2, 7, 1, 2, 8, 1, 2}, 1, 1)) == Tokens{8});  // the longer match first, then the last
  CHECK(drafts_of(drafter, {1, 2, 3}, 1, 3).empty());
  CHECK(drafts_of(drafter, {1}, 1, 3).empty());
  SmallText model;
  Engine engine(model, {.drafter = std::make_shared<generate::NgramDrafter>(), .drafts = 8});
  Settings settings{.temperature = 0, .max_tokens = 60};
  settings.allowed = [](std::span<const int64_t> tokens, std::vector<bool>& allowed) {  // a text with a period of 6
    for (size_t token = 0; token < allowed.size(); ++token) allowed[token] = token == tokens.size() % 6;
  };
  engine.generate({{1, 2, 3}}, settings);
  CHECK(tokens_a_pass(engine) >= 1.5);
}

TEST_CASE("generate drafts: trees of earlier outputs", "[generate]") {
  generate::RolloutTrees trees({.context = 4, .least = 0.1, .most_nodes = 200});
  const auto see = [&](Tokens tokens, int64_t prompt) { trees.observe(tokens, prompt, prompt); };
  see({7, 1, 2, 3}, 1);
  see({7, 1, 2, 4}, 1);
  see({7, 1, 2, 4}, 1);
  const auto drafts = drafts_of(trees, {7}, 1, 4);
  CHECK(tokens_of(drafts) == Tokens{1, 2, 4, 3});
  CHECK(drafts[2].parent == 1);
  CHECK(drafts[3].parent == 1);
  CHECK(tokens_of(drafts_of(trees, {7, 9, 1}, 1, 2)) == Tokens{2, 4});  // by the last token alone
  CHECK(drafts_of(trees, {8}, 1, 4).empty());                           // another prompt
  for (int64_t prompt = 10; prompt < 40; ++prompt) see({prompt, 1, 2, 3, 4, 5, 6}, 1);
  CHECK(trees.nodes() < 260);
  CHECK(drafts_of(trees, {7}, 1, 4).empty());  // forgotten
  CHECK_FALSE(drafts_of(trees, {39}, 1, 4).empty());
}

TEST_CASE("generate drafts: bad guesses are refused", "[generate]") {
  struct Bad final : generate::Drafter {
    explicit Bad(Draft of) : draft(of) {}
    std::vector<std::vector<Draft>> propose(const std::vector<generate::DraftContext>& outputs) override {
      return std::vector<std::vector<Draft>>(outputs.size(), {draft});
    }
    Draft draft;
  };
  SmallText model;
  for (const auto& draft : {Draft{23, -1}, Draft{-1, -1}, Draft{1, 0}, Draft{1, -2}}) {
    Engine engine(model, {.drafter = std::make_shared<Bad>(draft)});
    CHECK_THROWS_WITH(engine.generate({{1, 2}}, {.max_tokens = 5}), says("the drafter guessed token"));
  }
  refuses("n-grams", [] { generate::NgramDrafter none(0, 0); });
}

TEST_CASE("generate drafts: where many outputs are under way each gets fewer guesses", "[generate]") {
  struct Counting final : generate::Drafter {
    std::vector<std::vector<Draft>> propose(const std::vector<generate::DraftContext>& outputs) override {
      for (const auto& output : outputs) most.push_back(output.most);
      return std::vector<std::vector<Draft>>(outputs.size());
    }
    std::vector<int64_t> most;
  };
  SmallText model;
  for (const auto& [prompts, expected] : {std::pair<int64_t, int64_t>{1, 8}, {6, 2}, {30, 1}}) {
    const auto counting = std::make_shared<Counting>();
    Engine engine(model, {.drafter = counting, .drafts_per_step = 12});
    engine.generate(some_prompts(prompts), {.max_tokens = 20});
    REQUIRE_FALSE(counting->most.empty());
    CHECK(std::ranges::max(counting->most) == expected);
  }
}
