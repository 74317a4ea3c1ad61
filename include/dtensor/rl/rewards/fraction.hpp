// Exact fractions, and the arithmetic of a text: what answers are compared by.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// In lowest terms, with a positive denominator.
struct Fraction {
  int64_t above = 0;
  int64_t below = 1;
  bool operator==(const Fraction&) const = default;
};

// a op b of '+', '-', '*' and '/'. Nothing when it does not fit in 64 bits, and for a division by 0.
std::optional<Fraction> calculate(const Fraction& a, char op, const Fraction& b);

// A number as people write it: "-1,234.50", "$7", "+3.", ".5". Nothing for anything else, and for what does not fit in 64 bits.
std::optional<Fraction> read_number(std::string_view text);

// The value of "(1 + 2) * 3 / 4": whole numbers, + - * / with their usual order, signs, parentheses and spaces. `used` gets the numbers in
// it, in their order. Nothing for any other text, for one of more than 256 bytes or 32 levels of parentheses and signs, a division by 0 and
// what does not fit in 64 bits. Time and memory are bounded by the length.
std::optional<Fraction> evaluate(std::string_view text, std::vector<int64_t>* used = nullptr);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline std::string_view trimmed(std::string_view text) {
  const auto* blanks = " \t\r\n\f\v";
  const auto begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

__extension__ typedef __int128 Wide;

// Both fit, or nothing.
inline std::optional<Fraction> lowest_terms(Wide above, Wide below) {
  if (below == 0) return std::nullopt;
  if (below < 0) above = -above, below = -below;
  auto a = above < 0 ? -above : above, b = below;
  while (b != 0) std::swap(a %= b, b);
  if (a > 1) above /= a, below /= a;
  constexpr Wide most = INT64_MAX;
  if (above > most || above < -most || below > most) return std::nullopt;
  return Fraction{static_cast<int64_t>(above), static_cast<int64_t>(below)};
}

class Evaluator {
 public:
  Evaluator(std::string_view text, std::vector<int64_t>* used) : text_(text), used_(used) {}

  std::optional<Fraction> run() {
    const auto value = sum(0);
    skip();
    return at_ == text_.size() ? value : std::nullopt;
  }

 private:
  static constexpr int kDepth = 32;
  using Value = std::optional<Fraction>;

  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r')) ++at_;
  }

  // The next sign, if it is one of two.
  char take(char a, char b) {
    skip();
    return at_ < text_.size() && (text_[at_] == a || text_[at_] == b) ? text_[at_++] : '\0';
  }

  Value sum(int depth) {
    auto value = product(depth);
    while (value) {
      const char op = take('+', '-');
      if (op == '\0') break;
      const auto next = product(depth);
      value = next ? calculate(*value, op, *next) : std::nullopt;
    }
    return value;
  }

  Value product(int depth) {
    auto value = factor(depth);
    while (value) {
      const char op = take('*', '/');
      if (op == '\0') break;
      const auto next = factor(depth);
      value = next ? calculate(*value, op, *next) : std::nullopt;
    }
    return value;
  }

  Value factor(int depth) {
    if (depth >= kDepth) return std::nullopt;
    if (const char sign = take('+', '-')) {
      const auto value = factor(depth + 1);
      return value && sign == '-' ? calculate({0, 1}, '-', *value) : value;
    }
    if (take('(', '(')) {
      const auto value = sum(depth + 1);
      return take(')', ')') ? value : std::nullopt;
    }
    return number();
  }

  Value number() {
    int64_t value = 0;
    const auto begin = at_;
    for (; at_ < text_.size() && is_digit(text_[at_]); ++at_) {
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[at_] - '0', &value)) return std::nullopt;
    }
    if (at_ == begin) return std::nullopt;
    if (used_ != nullptr) used_->push_back(value);
    return Fraction{value, 1};
  }

  std::string_view text_;
  std::vector<int64_t>* used_;
  size_t at_ = 0;
};

}  // namespace detail

inline std::optional<Fraction> calculate(const Fraction& a, char op, const Fraction& b) {
  const detail::Wide p = a.above, q = a.below, r = b.above, s = b.below;
  switch (op) {
    // Each product is below 2^126 in magnitude, and so their sum below 2^127.
    case '+': return detail::lowest_terms(p * s + r * q, q * s);
    case '-': return detail::lowest_terms(p * s - r * q, q * s);
    case '*': return detail::lowest_terms(p * r, q * s);
    case '/': return detail::lowest_terms(p * s, q * r);
    default: return std::nullopt;
  }
}

inline std::optional<Fraction> read_number(std::string_view text) {
  text = detail::trimmed(text);
  char sign = '\0';
  for (const std::string_view prefix : {"+-", "$", "+-"}) {
    if (text.empty() || prefix.find(text[0]) == std::string_view::npos || (sign != '\0' && text[0] != '$')) continue;
    if (text[0] != '$') sign = text[0];
    text = detail::trimmed(text.substr(1));
  }
  int64_t value = 0, below = 1;
  bool is_behind_point = false, has_digit = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == ',' && !is_behind_point && has_digit && i + 1 < text.size()) continue;
    if (c == '.' && !is_behind_point) {
      is_behind_point = true;
      continue;
    }
    if (!detail::is_digit(c)) return std::nullopt;
    if (is_behind_point && c == '0' && text.find_first_not_of('0', i) == std::string_view::npos) break;  // "1.5000": no digit that matters
    has_digit = true;
    if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, c - '0', &value)) return std::nullopt;
    if (is_behind_point && __builtin_mul_overflow(below, 10, &below)) return std::nullopt;
  }
  if (!has_digit && text.find('0') == std::string_view::npos) return std::nullopt;
  return detail::lowest_terms(sign == '-' ? -value : value, below);
}

inline std::optional<Fraction> evaluate(std::string_view text, std::vector<int64_t>* used) {
  if (text.size() > 256) return std::nullopt;
  return detail::Evaluator(text, used).run();
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
