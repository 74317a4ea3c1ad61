// Whether two short texts of mathematics say the same.
#pragma once

#include <dtensor/rl/rewards/fraction.hpp>

#include <string>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// A text without what does not change its meaning, in the manner of Hendrycks et al.'s code for MATH (arXiv 2103.03874): blanks, "$",
// "\left", "\right", "\!" and other spaces, "\%" and "%", degrees, braces around a comma, a full stop at the end, "\text{...}" behind
// something (a unit), and "x =" before the only "="; \dfrac and \tfrac are \frac, \frac12 is \frac{1}{2} and \sqrt3 is \sqrt{3}.
std::string plain_math(std::string_view text);

// The number that a text is: a decimal, a/b, or \frac{a}{b} with a sign before it, after plain_math().
std::optional<Fraction> math_number(std::string_view text);

// Whether plain_math() of both is the same, or both are the same number. Texts of more than 4096 bytes are the same as nothing.
bool same_math(std::string_view a, std::string_view b);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline void replace_all(std::string& text, std::string_view from, std::string_view to) {
  std::string result;
  size_t at = 0;
  for (size_t next; (next = text.find(from, at)) != std::string::npos; at = next + from.size()) {
    result.append(text, at, next - at).append(to);
  }
  text = result.append(text, at);
}

inline bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// A command goes only where its name ends: "\left(" but not "\leftarrow".
inline void remove_command(std::string& text, std::string_view name) {
  std::string result;
  size_t at = 0;
  for (size_t next; (next = text.find(name, at)) != std::string::npos; at = next + name.size()) {
    const auto end = next + name.size();
    const bool is_longer = end < text.size() && is_letter(text[end]);
    result.append(text, at, next - at);
    if (is_longer) result.append(name);
  }
  text = result.append(text, at);
}

// Braces around the arguments of a command that stand as single characters.
inline void brace_arguments(std::string& text, std::string_view name, int arguments) {
  std::string result;
  size_t at = 0;
  for (size_t next; (next = text.find(name, at)) != std::string::npos;) {
    result.append(text, at, next + name.size() - at);
    at = next + name.size();
    for (int i = 0; i < arguments && at < text.size(); ++i) {
      if (text[at] == '{') {
        size_t open = 0, end = at;
        do {
          open += text[end] == '{';
          open -= text[end] == '}';
        } while (++end < text.size() && open > 0);
        result.append(text, at, end - at);
        at = end;
      } else if (is_digit(text[at]) || is_letter(text[at])) {
        result.append("{").append(1, text[at++]).append("}");
      } else {
        break;
      }
    }
  }
  text = result.append(text, at);
}

// "5\text{ cm}" is 5, and "\text{yes}" is yes.
inline void unwrap_text(std::string& text) {
  for (const std::string_view name : {"\\text{", "\\mathrm{", "\\mbox{", "\\textbf{"}) {
    const auto at = text.find(name);
    if (at == std::string::npos) continue;
    const auto end = text.find('}', at);
    if (end == std::string::npos) continue;
    if (at > 0 && end + 1 == text.size()) {
      text.resize(at);
    } else {
      text = text.substr(0, at) + text.substr(at + name.size(), end - at - name.size()) + text.substr(end + 1);
    }
  }
}

}  // namespace detail

inline std::string plain_math(std::string_view given) {
  std::string text(given);
  for (const std::string_view command : {"\\left", "\\right"}) detail::remove_command(text, command);
  for (const std::string_view command : {"\\dfrac", "\\tfrac"}) detail::replace_all(text, command, "\\frac");
  for (const std::string_view nothing :
       {"\\!", "\\,", "\\;", "\\:", "\\ ", "\\%", "%", "\\$", "$", "^\\circ", "^{\\circ}", " ", "\t", "\n", "\r"}) {
    detail::replace_all(text, nothing, "");
  }
  detail::replace_all(text, "{,}", ",");
  detail::unwrap_text(text);
  if (text.ends_with('.')) text.pop_back();
  const auto equals = text.find('=');
  if (equals != std::string::npos && equals <= 2 && text.find('=', equals + 1) == std::string::npos) text.erase(0, equals + 1);
  detail::brace_arguments(text, "\\frac", 2);
  detail::brace_arguments(text, "\\sqrt", 1);
  return text;
}

inline std::optional<Fraction> math_number(std::string_view given) {
  const auto plain = plain_math(given);
  std::string_view text = plain;
  if (const auto number = read_number(text)) return number;
  bool is_negative = false;
  if (text.starts_with('-')) is_negative = true, text.remove_prefix(1);
  std::optional<Fraction> above, below;
  if (text.starts_with("\\frac{")) {
    text.remove_prefix(6);
    const auto middle = text.find("}{");
    if (middle == std::string_view::npos || !text.ends_with('}')) return std::nullopt;
    above = read_number(text.substr(0, middle));
    below = read_number(text.substr(middle + 2, text.size() - middle - 3));
  } else if (const auto slash = text.find('/'); slash != std::string_view::npos) {
    above = read_number(text.substr(0, slash));
    below = read_number(text.substr(slash + 1));
  }
  if (!above || !below) return std::nullopt;
  const auto value = calculate(*above, '/', *below);
  return value && is_negative ? calculate({0, 1}, '-', *value) : value;
}

inline bool same_math(std::string_view a, std::string_view b) {
  constexpr size_t most = 4096;
  if (a.size() > most || b.size() > most) return false;
  const auto x = plain_math(a);
  if (!x.empty() && x == plain_math(b)) return true;
  const auto p = math_number(a), q = math_number(b);
  return p && q && *p == *q;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
