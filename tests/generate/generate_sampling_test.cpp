// The distribution that settings make of scores, and draws from it.
#include "tests/support/chi_square.hpp"
#include "tests/support/core_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/generate/sampling.hpp>

#include <torch/torch.h>

#include <cmath>
#include <random>

using namespace dtensor;
using namespace dtensor::test;
using generate::Distribution;
using generate::Settings;
using generate::Tokens;

namespace {

std::vector<double> probabilities(const std::vector<float>& scores, const Settings& settings, const Tokens& tokens = {0},
                                  int64_t prompt = 1) {
  const Distribution distribution(std::span<const float>(scores), settings, tokens, prompt);
  std::vector<double> all(scores.size());
  for (const auto& [token, p] : distribution.entries()) all[token] = p;
  return all;
}

// Scores of these probabilities.
std::vector<float> scores_of(const std::vector<double>& probabilities) {
  std::vector<float> scores;
  for (const auto p : probabilities) scores.push_back(static_cast<float>(std::log(p)));
  return scores;
}

bool are_near(const std::vector<double>& a, const std::vector<double>& b, double bound = 1e-6) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::abs(a[i] - b[i]) > bound) return false;
  }
  return true;
}

const std::vector<double> kFive{0.1, 0.4, 0.25, 0.05, 0.2};

// Scores like a model's, alike ones, many equal ones, and some that are not allowed.
std::vector<std::vector<double>> scores_of_all_kinds(size_t count) {
  std::mt19937_64 random(count);
  std::normal_distribution<double> normal(0, 1);
  std::vector<std::vector<double>> all;
  for (const double width : {1e-9, 0.3, 3.0, 30.0}) {
    auto& scores = all.emplace_back(count);
    for (auto& score : scores) score = 7 + width * normal(random);
  }
  auto& equal = all.emplace_back(count);
  for (auto& score : equal) score = std::round(normal(random));
  auto& holes = all.emplace_back(count);
  for (auto& score : holes) score = random() % 3 == 0 ? -std::numeric_limits<double>::infinity() : 2 * normal(random);
  holes[count / 2] = 0.5;
  auto& rising = all.emplace_back(count);
  for (size_t i = 0; i < count; ++i) rising[i] = static_cast<double>(i) * 0.01;
  return all;
}

std::vector<Settings> settings_of_all_kinds() {
  std::vector<Settings> all;
  for (const double temperature : {0.0, 1e-3, 0.4, 1.0, 3.0}) {
    const auto add = [&](Settings settings) {
      settings.temperature = temperature;
      all.push_back(settings);
    };
    add({});
    for (const int64_t k : {1, 7, 50}) add({.top_k = k});
    for (const double p : {1e-9, 0.1, 0.5, 0.95, 1 - 1e-15}) add({.top_p = p});
    for (const double p : {1e-30, 0.05, 1.0}) add({.min_p = p});
    add({.typical = 0.7});
    add({.top_k = 20, .top_p = 0.9});
    add({.top_k = 20, .min_p = 0.1});
    add({.top_p = 0.9, .min_p = 0.01});
    add({.top_k = 30, .top_p = 0.9, .min_p = 0.01, .typical = 0.8});
    add({.top_k = 9, .repetition_penalty = 1.3, .presence_penalty = 0.2, .logit_bias = {{0, 2.0}}, .bad_words = {{1}}});
    add({.min_tokens = 9, .stop_tokens = {0, 2}});
  }
  return all;
}

template <class T>
void require_the_definition(const std::vector<T>& scores, const Settings& settings) {
  const Tokens tokens{0, 1, 2, 2};
  const std::span<const T> all(scores);
  const auto defined = Distribution::by_definition(all, settings, tokens, 1);
  const Distribution made(all, settings, tokens, 1);
  require(made.entries() == defined.entries(), "test", "other entries: {} of them; expected {}", made.entries().size(),
          defined.entries().size());
  std::mt19937_64 random(5);
  std::vector<double> numbers{0, 1e-300, 1e-12, 0.5, 1 - 1e-12, 1 - 1.2e-16};
  double sum = 0;
  for (const auto& entry : defined.entries()) {  // next to where one token ends and another begins
    sum += entry.probability;
    if (numbers.size() < 60) numbers.insert(numbers.end(), {std::nextafter(sum, 0.), sum, std::nextafter(sum, 2.)});
  }
  for (int i = 0; i < 20; ++i) numbers.push_back(std::uniform_real_distribution<double>()(random));
  for (const auto number : numbers) {
    if (number >= 1) continue;
    const auto token = generate::draw_token(all, settings, tokens, 1, number);
    require(token == defined.draw(number), "test", "drew {} at {}; expected {}", token, number, defined.draw(number));
  }
}

}  // namespace

TEST_CASE("generate sampling: each cut leaves what it should", "[generate]") {
  const auto scores = scores_of(kFive);
  CHECK(are_near(probabilities(scores, {}), kFive));
  CHECK(are_near(probabilities(scores, {.temperature = 0}), {0, 1, 0, 0, 0}));
  CHECK(are_near(probabilities(scores, {.top_k = 2}), {0, 0.4 / 0.65, 0.25 / 0.65, 0, 0}));
  CHECK(are_near(probabilities(scores, {.top_p = 0.66}), {0, 0.4 / 0.85, 0.25 / 0.85, 0, 0.2 / 0.85}));
  CHECK(are_near(probabilities(scores, {.top_p = 0.64}), {0, 0.4 / 0.65, 0.25 / 0.65, 0, 0}));
  CHECK(are_near(probabilities(scores, {.top_p = 1e-9}), {0, 1, 0, 0, 0}));
  CHECK(are_near(probabilities(scores, {.min_p = 0.3}), {0, 0.4 / 0.85, 0.25 / 0.85, 0, 0.2 / 0.85}));
  // top_p of what top_k left: 0.4 of 0.65 is 0.615.
  CHECK(are_near(probabilities(scores, {.top_k = 2, .top_p = 0.61}), {0, 1, 0, 0, 0}));
  // The entropy is 1.4150: the closest are 0.25 (1.386), 0.2 (1.609), 0.4 (0.916), 0.1 (2.303), 0.05.
  CHECK(are_near(probabilities(scores, {.typical = 0.3}), {0, 0, 0.25 / 0.45, 0, 0.2 / 0.45}));
  double sum = 0;
  for (const auto p : kFive) sum += p * p;
  std::vector<double> sharp;
  for (const auto p : kFive) sharp.push_back(p * p / sum);
  CHECK(are_near(probabilities(scores, {.temperature = 0.5}), sharp));
}

TEST_CASE("generate sampling: equal scores go by the number of the token", "[generate]") {
  CHECK(are_near(probabilities({1, 2, 2, 2}, {.temperature = 0}), {0, 1, 0, 0}));
  CHECK(are_near(probabilities({1, 2, 2, 2}, {.top_k = 2}), {0, 0.5, 0.5, 0}));
}

TEST_CASE("generate sampling: penalties and biases and what is not allowed", "[generate]") {
  const std::vector<float> scores{1, -1, 2, 0};
  const Tokens tokens{0, 1, 2, 2};  // the prompt is 0
  const auto of = [&](const std::vector<float>& changed) { return probabilities(changed, {}); };
  CHECK(are_near(probabilities(scores, {.repetition_penalty = 2}, tokens), of({0.5, -2, 1, 0})));
  CHECK(are_near(probabilities(scores, {.presence_penalty = 0.5}, tokens), of({1, -1.5, 1.5, 0})));
  CHECK(are_near(probabilities(scores, {.frequency_penalty = 0.5}, tokens), of({1, -1.5, 1, 0})));
  CHECK(are_near(probabilities(scores, {.logit_bias = {{3, 1.5}}}, tokens), of({1, -1, 2, 1.5})));
  const auto no_two = probabilities({1, -1, -INFINITY, 0}, {});
  CHECK(are_near(probabilities(scores, {.bad_words = {{2}}}, tokens), no_two));
  CHECK(are_near(probabilities(scores, {.bad_words = {{2, 2}}}, tokens), no_two));
  CHECK(are_near(probabilities(scores, {.bad_words = {{1, 2}}}, tokens), of(scores)));
  CHECK(are_near(probabilities(scores, {.bad_words = {{0, 1, 2, 2, 2}}}, tokens), of(scores)));  // the prompt is not output
  CHECK(are_near(probabilities(scores, {.min_tokens = 4, .stop_tokens = {2}}, tokens), no_two));
  CHECK(are_near(probabilities(scores, {.min_tokens = 3, .stop_tokens = {2}}, tokens), of(scores)));
  Settings settings;
  settings.allowed = [&](std::span<const int64_t> so_far, std::vector<bool>& allowed) {
    require(so_far.size() == 4 && allowed.size() == 4, "test", "other tokens");
    allowed[2] = false;
  };
  CHECK(are_near(probabilities(scores, settings, tokens), no_two));
}

TEST_CASE("generate sampling: draws have the law that the cuts leave", "[generate]") {
  const auto scores = scores_of({0.02, 0.3, 0.08, 0.15, 0.05, 0.2, 0.1, 0.1});
  const Settings all[] = {{},
                          {.temperature = 0.7},
                          {.temperature = 1.7},
                          {.top_k = 3},
                          {.top_p = 0.8},
                          {.min_p = 0.4},
                          {.typical = 0.6},
                          {.temperature = 0.9, .top_k = 6, .top_p = 0.9, .min_p = 0.1}};
  constexpr int64_t kDraws = 200'000;
  for (const auto& settings : all) {
    const auto expected = probabilities(scores, settings);
    const Distribution distribution(std::span<const float>(scores), settings, Tokens{0}, 1);
    std::vector<int64_t> counts(scores.size());
    for (int64_t i = 0; i < kDraws; ++i) ++counts[distribution.draw(generate::uniform_of(11, i % 7, i))];
    CHECK(chi_square_ratio(counts, expected) < 1);
    std::swap(counts[1], counts[5]);  // which the test notices, where both are left
    if (expected[1] > 0 && expected[5] > 0) CHECK(chi_square_ratio(counts, expected) > 1);
  }
}

TEST_CASE("generate sampling: a draw is where the sum exceeds the number", "[generate]") {
  const Distribution distribution(std::vector<Distribution::Entry>{{4, 0.25}, {1, 0}, {7, 0.5}, {2, 0.25}});
  CHECK(distribution.draw(0) == 4);
  CHECK(distribution.draw(0.2499) == 4);
  CHECK(distribution.draw(0.25) == 7);
  CHECK(distribution.draw(0.75) == 2);
  CHECK(distribution.draw(1 - 1e-16) == 2);
  CHECK(distribution.probability(7) == 0.5);
  CHECK(distribution.probability(3) == 0);
}

TEST_CASE("generate sampling: numbers of a stream are those of a generator", "[generate]") {
  REQUIRE_NOTHROW(on_ranks(1, [](World&) {
    auto generator = dtensor::Generator(42);
    for (uint64_t draw = 0; draw < 2; ++draw) {
      const auto numbers = torch::empty({5}, at::kDouble).uniform_(0, 1, generator);
      for (int64_t i = 0; i < 5; ++i) require(rng::uniform_at(42, draw, i) == numbers[i].item<double>(), "test", "another number {}", i);
    }
  }));
}

TEST_CASE("generate sampling: settings that make no sense are refused by name", "[generate]") {
  const auto bad = [](const std::string& text, const Settings& settings) { refuses(text, [&] { generate::check(settings, 8); }); };
  bad("got a temperature of -0.1", {.temperature = -0.1});
  bad("temperature", {.temperature = std::nan("")});
  bad("got top_p of 0", {.top_p = 0});
  bad("top_p", {.top_p = 1.5});
  bad("top_k", {.top_k = -1});
  bad("min_p", {.min_p = 2});
  bad("typical", {.typical = 0});
  bad("repetition penalty", {.repetition_penalty = 0});
  bad("got n of 0; expected 1 or more outputs", {.n = 0});
  bad("max_tokens", {.max_tokens = 0});
  bad("min_tokens", {.max_tokens = 3, .min_tokens = 4});
  bad("stop_tokens has token 8; expected 0 to 7", {.stop_tokens = {8}});
  bad("logit_bias has token -1", {.logit_bias = {{-1, 0.}}});
  bad("bad words is empty", {.bad_words = {{}}});
  bad("stop texts is empty", {.stop = {""}});
  const std::vector<float> nan{0, std::nanf("")}, none{0, 0};
  refuses("NaN", [&] { probabilities(nan, {}); });
  refuses("no token is allowed", [&] { probabilities(none, {.bad_words = {{0}, {1}}}); });
}

TEST_CASE("generate sampling: the ways that look at few tokens give the definition to the bit", "[generate]") {
  for (const size_t count : {3, 70, 500}) {
    for (const auto& scores : scores_of_all_kinds(count)) {
      const std::vector<float> short_ones(scores.begin(), scores.end());
      for (const auto& settings : settings_of_all_kinds()) {
        CAPTURE(count, settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.typical);
        REQUIRE_NOTHROW(require_the_definition(scores, settings));
        REQUIRE_NOTHROW(require_the_definition(short_ones, settings));
      }
    }
  }
}

TEST_CASE("generate sampling: the ways do without the definition for scores like a model's", "[generate]") {
  const auto scores = scores_of_all_kinds(1500)[2];
  const Settings settings;
  const generate::detail::Weights<double> weights(scores, generate::detail::largest_of(std::span<const double>(scores), 1), settings, 1);
  CHECK(generate::detail::first_entries(weights, 40));
  CHECK(generate::detail::share_entries(weights, 0.95));
  int64_t answers = 0;
  for (int i = 0; i < 1000; ++i) answers += generate::detail::draw_of_all(weights, i / 1000.0) ? 1 : 0;
  CHECK(answers >= 999);  // at 0 the first token may have no weight
}
