// Small tasks that a model of 0.1 million parameters learns from rewards, within minutes of one core.
#pragma once

#include <dtensor/rl/rewards/verifiers.hpp>
#include <dtensor/rl/trainer.hpp>

namespace tasks {

namespace rl = dtensor::rl;
using dtensor::generate::Tokens;

// Tokens are these characters.
inline const std::string kCharacters = "0123456789+-*=:, ";
constexpr int64_t kVocabulary = 32;

inline Tokens tokens_of(const std::string& text) {
  Tokens tokens;
  for (const char c : text) tokens.push_back(static_cast<int64_t>(kCharacters.find(c)));
  return tokens;
}

inline std::string text_of(int64_t token) {
  return token < static_cast<int64_t>(kCharacters.size()) ? std::string(1, kCharacters[token]) : "?";
}

// The i-th of the numbers below `bound` that number `number` of a list drawn by a seed has.
inline int64_t draw(uint64_t seed, int64_t number, int64_t i, int64_t bound) {
  return static_cast<int64_t>(dtensor::rng::uniform_at(seed, static_cast<uint64_t>(number), i) * static_cast<double>(bound));
}

// One problem in eight is held out: those of which this is true.
inline bool is_held_out(const std::string& problem) {
  uint64_t hash = 1469598103934665603ULL;  // FNV-1a
  for (const char c : problem) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return (hash >> 20) % 8 == 0;
}

// A problem's text up to its answer, the right answer, and what a verifier knows.
struct Problem {
  std::string text, answer;
  nlohmann::json truth;
};

// `make(attempt)` draws problems; the first one that is, or is not, held out.
template <class Make>
Problem first_problem(bool held_out, Make make) {
  for (int64_t attempt = 0;; ++attempt) {
    auto problem = make(attempt);
    if (is_held_out(problem.text) == held_out) return problem;
  }
}

// Half of a reward for the share of characters that are right, half for all of them.
inline rl::Verdict character_verdict(const std::string& text, const std::string& answer) {
  double right = 0;
  for (size_t i = 0; i < answer.size(); ++i)
    right += i < text.size() && text[i] == answer[i] ? 1.0 / static_cast<double>(answer.size()) : 0;
  const bool exact = text == answer;
  return {.score = 0.5 * right + (exact ? 0.5 : 0.0), .right = exact};
}

// "3142=" -> "1234"
inline Problem sort4(uint64_t seed, int64_t number) {
  std::string digits;
  for (int64_t i = 0; i < 4; ++i) digits += static_cast<char>('0' + draw(seed, number, i, 10));
  auto sorted = digits;
  std::ranges::sort(sorted);
  return {digits + "=", sorted, {{"answer", sorted}, {"digits", digits}}};
}

// An answer that is right because it is the prompt has sorted nothing: it is flawed.
inline rl::Verdict sort4_verdict(const std::string& text, const nlohmann::json& truth) {
  auto verdict = character_verdict(text, truth.at("answer"));
  verdict.flawed = verdict.right && text == truth.at("digits").get<std::string>();
  return verdict;
}

// "357:05=" -> "3+7-5": an expression of the three numbers, in any order, of this value.
inline Problem countdown3(uint64_t seed, int64_t number) {
  std::vector<int64_t> numbers, signs;
  for (int64_t i = 0; i < 3; ++i) numbers.push_back(1 + draw(seed, number, i, 9));
  for (int64_t i = 3; i < 5; ++i) signs.push_back(draw(seed, number, i, 2) == 0 ? 1 : -1);
  if (numbers[0] + signs[0] * numbers[1] + signs[1] * numbers[2] < 0) signs = {1, 1};
  const auto target = numbers[0] + signs[0] * numbers[1] + signs[1] * numbers[2];
  const auto sign = [&](int i) { return signs[i] > 0 ? '+' : '-'; };
  auto shown = numbers;
  std::ranges::sort(shown);
  return {fmt::format("{}{}{}:{:02}=", shown[0], shown[1], shown[2], target),
          fmt::format("{}{}{}{}{}", numbers[0], sign(0), numbers[1], sign(1), numbers[2]),
          {{"numbers", shown}, {"target", target}}};
}

// 1 for the value, 0.1 for an expression of the numbers.
inline rl::Verdict countdown3_verdict(const std::string& text, const nlohmann::json& truth) {
  std::vector<int64_t> used;
  const auto value = rl::evaluate(text, &used);
  std::ranges::sort(used);
  const bool of_these = value && used == truth.at("numbers").get<std::vector<int64_t>>();
  const bool right = of_these && *value == rl::Fraction{truth.at("target").get<int64_t>(), 1};
  return {.score = right ? 1.0 : of_these ? 0.1 : 0.0, .right = right};
}

// "37+85=" -> "221": the sum, its last digit first.
inline Problem arithmetic(uint64_t seed, int64_t number) {
  const auto a = draw(seed, number, 0, 100), b = draw(seed, number, 1, 100);
  auto sum = fmt::format("{:03}", a + b);
  std::ranges::reverse(sum);
  return {fmt::format("{:02}+{:02}=", a, b), sum, sum};
}

struct Recipe {
  std::function<Problem(uint64_t seed, int64_t number)> draw;
  rl::Verifier verifier;
  nlohmann::json options;  // that suit it
};

inline const std::map<std::string, Recipe>& recipes() {
  static const std::map<std::string, Recipe> all{
      {"sort4",
       {sort4,
        sort4_verdict,
        {{"prompts", 32},
         {"samples", 8},
         {"epochs", 2},
         {"clip_high", 0.28},
         {"entropy_bonus", 0.1},
         {"lr_end", 0.1},
         {"steps", 500},
         {"max_tokens", 4}}}},
      {"countdown3",
       {countdown3,
        countdown3_verdict,
        {{"sft_steps", 90},
         {"prompts", 32},
         {"samples", 8},
         {"epochs", 2},
         {"weight_decay", 0.1},  // with 0.01 it learns the problems that it sees by heart
         {"clip_high", 0.28},
         {"entropy_bonus", 0.02},
         {"lr_end", 0.1},
         {"steps", 300},
         {"max_tokens", 5}}}},
      {"arithmetic",
       {arithmetic,
        [](const std::string& text, const nlohmann::json& truth) { return character_verdict(text, truth); },
        {{"algorithm", "ppo"},
         {"sft_steps", 400},
         {"prompts", 256},
         {"epochs", 2},
         {"minibatches", 2},
         {"weight_decay", 0.1},
         {"lambda", 0.95},
         {"entropy_bonus", 0.01},
         {"lr_end", 0.1},
         {"steps", 200},
         {"max_tokens", 3}}}},
  };
  return all;
}

inline rl::Task task(const std::string& name, uint64_t seed) {
  const auto& recipe = recipes().at(name);
  const auto prompts = [recipe](uint64_t seed, bool held_out) {
    return [recipe, seed, held_out](int64_t number) {
      return first_problem(held_out, [&](int64_t attempt) { return recipe.draw(seed, (number << 16) + attempt); });
    };
  };
  const auto prompt_of = [](const Problem& problem) { return rl::Prompt{tokens_of(problem.text), problem.truth}; };
  rl::Task task;
  task.prompt = [=, next = prompts(2 * seed + 2, false)](int64_t number) { return prompt_of(next(number)); };
  task.held_out = [=, next = prompts(1, true)](int64_t number) { return prompt_of(next(number)); };
  task.example = [=, next = prompts(2 * seed + 3, false)](int64_t number) {
    const auto problem = next(number);
    return std::pair(prompt_of(problem), tokens_of(problem.answer));
  };
  task.verifier = recipe.verifier;
  task.engine.text_of = text_of;
  task.engine.max_requests = 512;
  task.engine.cache_bytes = int64_t{64} << 20;
  return task;
}

}  // namespace tasks
