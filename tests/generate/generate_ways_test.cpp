// The ways to a token that look at few scores: to the bit what the definition gives.
#include "tests/support/core_support.hpp"

#include <dtensor/generate/sampling.hpp>

#include <random>

using namespace dtensor;
using namespace dtensor::test;
using generate::Distribution;
using generate::Settings;
using generate::Tokens;

namespace {

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
