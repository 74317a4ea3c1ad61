// Guesses leave the law of what is drawn as it is: of three tokens, after each kind of guesses.
#include "tests/support/chi_square.hpp"
#include "tests/support/generate_support.hpp"

#include <dtensor/generate/drafters.hpp>

using namespace dtensor;
using namespace dtensor::test;
using generate::Draft;
using generate::Settings;
using generate::Tokens;

namespace {

constexpr int64_t kLetters = 4;  // tokens that may come; the others have a bias of -infinity

Settings of_few_letters(Settings settings) {
  for (int64_t token = kLetters; token < kVocabulary; ++token) settings.logit_bias[token] = -std::numeric_limits<double>::infinity();
  settings.max_tokens = 4;
  return settings;
}

// Of all triples, from the model's own forward.
std::vector<double> exact_law(SmallText& model, const Tokens& prompt, const Settings& settings) {
  const torch::NoGradGuard no_grad;
  std::vector<double> law{1};
  for (int64_t step = 0, known = 1; step < 3; ++step, known *= kLetters) {
    std::vector<double> longer;
    for (int64_t i = 0; i < known; ++i) {
      auto tokens = prompt;
      for (auto power = known / kLetters, rest = i; power > 0; rest %= power, power /= kLetters) tokens.push_back(rest / power);
      const auto scores = model.forward(torch::tensor(tokens, at::kLong).unsqueeze(0))[0][-1].contiguous();
      const std::span<const double> row(scores.data_ptr<double>(), scores.numel());
      const auto next = generate::Distribution::by_definition(row, settings, tokens, static_cast<int64_t>(prompt.size()));
      for (int64_t token = 0; token < kLetters; ++token) longer.push_back(law[i] * next.probability(token));
    }
    law = longer;
  }
  return law;
}

// Trees whose guesses know nothing, of all letters.
struct BlindTrees final : generate::Drafter {
  std::vector<std::vector<Draft>> propose(const std::vector<generate::DraftContext>& outputs) override {
    std::vector<std::vector<Draft>> all;
    for (const auto& output : outputs) {
      auto& drafts = all.emplace_back();
      for (int64_t i = 0; i < output.most; ++i) {
        const auto parent = static_cast<int64_t>(random() % static_cast<uint64_t>(i + 1)) - 1;
        drafts.push_back({static_cast<int64_t>(random() % kLetters), parent});
      }
    }
    return all;
  }
  std::mt19937_64 random{8};
};

}  // namespace

TEST_CASE("generate law: three tokens have the law of the model under every kind of guesses", "[generate]") {
  SmallText model(21), smaller(22);
  const Tokens prompt{3, 1, 0, 1, 2, 0, 1};
  struct Way {
    const char* name;
    std::shared_ptr<generate::Drafter> drafter;
    double least;  // tokens a pass
  };
  const Way ways[] = {{"no guesses", nullptr, 1},
                      {"n-grams", std::make_shared<generate::NgramDrafter>(), 1.02},
                      {"a tree of earlier outputs", std::make_shared<generate::RolloutTrees>(), 1.3},
                      {"a smaller model", std::make_shared<generate::DraftModel>(smaller), 1.02},
                      {"blind trees", std::make_shared<BlindTrees>(), 1.1}};
  const auto whole = of_few_letters({.temperature = 3}), cut = of_few_letters({.temperature = 4, .top_p = 0.9});
  uint64_t seed = 100;
  for (const auto& from : {whole, cut}) {
    const auto law = exact_law(model, prompt, from);
    auto warmer = from;
    warmer.temperature *= 1.15;
    const auto another = exact_law(model, prompt, warmer);
    for (const auto& [name, drafter, least] : ways) {
      auto settings = from;
      settings.n = 400;
      generate::Engine engine(model, {.drafter = drafter, .drafts = 8});
      std::vector<int64_t> counts(law.size());
      for (int request = 0; request < 20; ++request) {
        settings.seed = ++seed;
        const auto completion = engine.generate({prompt}, settings)[0];
        for (const auto& output : completion.outputs) {
          const auto& t = output.tokens;
          ++counts[(t[0] * kLetters + t[1]) * kLetters + t[2]];
        }
      }
      CAPTURE(name, settings.top_p, law, counts);
      CHECK(chi_square_ratio(counts, law) < 1);
      CHECK(chi_square_ratio(counts, another) > 1);
      const auto done = engine.counts();
      CHECK(static_cast<double>(done.tokens) / static_cast<double>(done.sequence_passes) >= least);
    }
  }
}
