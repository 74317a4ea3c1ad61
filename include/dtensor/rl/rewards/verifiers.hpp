// Rewards by rules: functions of an answer's text. They throw nothing, whatever the text is, and take time in proportion to its length.
//
//   rl::number_score("... so she pays 18.\n#### 18", "18")                  1
//   rl::boxed_score("thus $x = \\boxed{\\frac12}$", "0.5")                   1
//   rl::countdown_score("<answer>(5 - 2) * 4</answer>", {2, 4, 5}, 12)      1
#pragma once

#include <dtensor/rl/rewards/fraction.hpp>
#include <dtensor/rl/rewards/math_text.hpp>

#include <initializer_list>
#include <span>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What a right answer gets, one that is wrong but where it should be ("<answer>7</answer>"), and any other. TinyZero has 1, 0.1 and 0.
struct Scores {
  double right = 1;
  double form = 0;
  double none = 0;
};

// The text is the truth, but for blanks at its ends.
double exact_score(std::string_view text, std::string_view truth, const Scores& scores = {});

// The number after the last `marker` is that of the truth: "1,234.0" is 1234, "$7" is 7. (GSM8K: Cobbe et al., arXiv 2110.14168. verl
// compares the texts without commas and "$".) A text that ends at once behind the marker, or has something else there, has no answer.
double number_score(std::string_view text, std::string_view truth, const Scores& scores = {}, std::string_view marker = "####");

// What stands in the last \boxed{...} (or \fbox{...}) is the truth, as same_math() sees it. An answer whose brace is never closed is none.
double boxed_score(std::string_view text, std::string_view truth, const Scores& scores = {});

// What stands in the last <answer>...</answer> is an expression of the target's value, in which each of the numbers stands once and no
// other (TinyZero). See evaluate() for what an expression is; values are exact fractions.
double countdown_score(std::string_view text, std::span<const int64_t> numbers, int64_t target, const Scores& scores = {});
double countdown_score(std::string_view text, std::initializer_list<int64_t> numbers, int64_t target, const Scores& scores = {});

// Whether the text is, but for blanks between and at the ends, <a>...</a><b>...</b> for the names a, b, ... in this order, and has each of
// these tags once. The form of DeepSeek-R1: {"think", "answer"}.
bool has_form(std::string_view text, std::initializer_list<std::string_view> names);

// What stands between the last `open` that is closed and its `close`: between_last(text, "<answer>", "</answer>").
std::optional<std::string_view> between_last(std::string_view text, std::string_view open, std::string_view close);

// What stands in the last \boxed{...} or \fbox{...}, with the braces in it balanced. Blanks may stand before the first brace.
std::optional<std::string_view> last_boxed(std::string_view text);

// -- How ------------------------------------------------------------------------------------------------------------------

inline double exact_score(std::string_view text, std::string_view truth, const Scores& scores) {
  const auto answer = detail::trimmed(text);
  return answer == detail::trimmed(truth) ? scores.right : answer.empty() ? scores.none : scores.form;
}

inline double number_score(std::string_view text, std::string_view truth, const Scores& scores, std::string_view marker) {
  const auto at = text.rfind(marker);
  if (marker.empty() || at == std::string_view::npos) return scores.none;
  auto answer = text.substr(at + marker.size());
  answer.remove_prefix(std::min(answer.find_first_not_of(" \t"), answer.size()));
  const auto number = read_number(answer.substr(0, answer.find_first_not_of("+-$ 0123456789,.")));
  if (!number) return scores.none;
  const auto expected = read_number(truth);
  return expected && *number == *expected ? scores.right : scores.form;
}

inline std::optional<std::string_view> between_last(std::string_view text, std::string_view open, std::string_view close) {
  if (open.empty() || close.empty()) return std::nullopt;
  const auto end = text.rfind(close);
  if (end == std::string_view::npos) return std::nullopt;
  const auto begin = text.substr(0, end).rfind(open);
  if (begin == std::string_view::npos) return std::nullopt;
  return text.substr(begin + open.size(), end - begin - open.size());
}

inline std::optional<std::string_view> last_boxed(std::string_view text) {
  size_t begin = std::string_view::npos;
  for (const std::string_view name : {"\\boxed", "\\fbox"}) {
    for (auto at = text.rfind(name); at != std::string_view::npos; at = at > 0 ? text.rfind(name, at - 1) : std::string_view::npos) {
      const auto brace = text.find_first_not_of(" \t\n", at + name.size());
      if (brace == std::string_view::npos || text[brace] != '{') continue;
      if (begin == std::string_view::npos || brace + 1 > begin) begin = brace + 1;
      break;
    }
  }
  if (begin == std::string_view::npos) return std::nullopt;
  size_t open = 1;
  for (size_t i = begin; i < text.size(); ++i) {
    if (text[i] == '{') ++open;
    if (text[i] == '}' && --open == 0) return text.substr(begin, i - begin);
  }
  return std::nullopt;
}

inline double boxed_score(std::string_view text, std::string_view truth, const Scores& scores) {
  const auto answer = last_boxed(text);
  if (!answer || detail::trimmed(*answer).empty()) return scores.none;
  return same_math(*answer, truth) ? scores.right : scores.form;
}

inline double countdown_score(std::string_view text, std::span<const int64_t> numbers, int64_t target, const Scores& scores) {
  const auto answer = between_last(text, "<answer>", "</answer>");
  if (!answer) return scores.none;
  std::vector<int64_t> used, given(numbers.begin(), numbers.end());
  const auto value = evaluate(*answer, &used);
  std::ranges::sort(used);
  std::ranges::sort(given);
  return value && *value == Fraction{target, 1} && used == given ? scores.right : scores.form;
}

inline double countdown_score(std::string_view text, std::initializer_list<int64_t> numbers, int64_t target, const Scores& scores) {
  return countdown_score(text, std::span<const int64_t>(numbers.begin(), numbers.size()), target, scores);
}

inline bool has_form(std::string_view text, std::initializer_list<std::string_view> names) {
  for (const auto name : names) {
    text = detail::trimmed(text);
    const auto open = "<" + std::string(name) + ">", close = "</" + std::string(name) + ">";
    if (!text.starts_with(open)) return false;
    const auto end = text.find(close, open.size());
    if (end == std::string_view::npos) return false;
    const auto inside = text.substr(open.size(), end - open.size());
    for (const auto other : names) {
      if (inside.find("<" + std::string(other) + ">") != std::string_view::npos) return false;
      if (inside.find("</" + std::string(other) + ">") != std::string_view::npos) return false;
    }
    text.remove_prefix(end + close.size());
  }
  return detail::trimmed(text).empty();
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
