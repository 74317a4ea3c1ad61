// Patterns of fully qualified names.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::detail {

// Whether `name` matches. `*` matches any run of characters, `?` one, and `a|b` either side; "re:" begins a regular expression
// (ECMAScript's) of whole names. Throws for an invalid regular expression.
bool matches(std::string_view pattern, std::string_view name);

// The pattern for `name` inside the modules that `modules` matches: "a|b" and "weight" give "a.weight|b.weight".
std::string inside(const std::string& modules, const std::string& name);

// The three names that resemble a pattern most, for messages.
std::string closest(const std::string& pattern, const std::vector<std::string>& names);

// -- How -----------------------------------------------------------------------------------------------------------------

inline constexpr std::string_view kRegex = "re:";

// Where a letter does not match, the last '*' takes one more: an earlier one need not, so this takes no longer with many.
inline bool matches_one(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0, star = pattern.npos, taken = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star != pattern.npos) {
      p = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == pattern.npos;
}

// How many letters to change, add or leave out until the pattern, without '|', matches the name (Levenshtein, 1966; '*' and '?' as in
// matches).
inline size_t distance(std::string_view pattern, std::string_view name) {
  std::vector<size_t> row(name.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (const char letter : pattern) {
    const bool any = letter == '*';
    size_t diagonal = std::exchange(row[0], row[0] + !any);
    for (size_t j = 0; j < name.size(); ++j) {
      const size_t changed = diagonal + (!any && letter != '?' && letter != name[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + !any, diagonal + !any});
    }
  }
  return row.back();
}

inline bool is_regex(std::string_view pattern) { return pattern.substr(0, kRegex.size()) == kRegex; }

// What lies between the bars of "a|b"; a regular expression is one side.
inline std::vector<std::string_view> sides(std::string_view pattern) {
  if (is_regex(pattern)) return {pattern};
  std::vector<std::string_view> result;
  for (size_t bar; (bar = pattern.find('|')) != std::string_view::npos; pattern.remove_prefix(bar + 1)) {
    result.push_back(pattern.substr(0, bar));
  }
  result.push_back(pattern);
  return result;
}

inline size_t distance_of_any(std::string_view pattern, std::string_view name) {
  size_t least = SIZE_MAX;
  for (const auto side : sides(pattern)) least = std::min(least, distance(side, name));
  return least;
}

// Compiled, because <regex> takes long to compile.
bool matches_regex(std::string_view regex, std::string_view name);

inline bool matches(std::string_view pattern, std::string_view name) {
  if (is_regex(pattern)) return matches_regex(pattern.substr(kRegex.size()), name);
  const auto all = sides(pattern);
  return std::ranges::any_of(all, [&](std::string_view side) { return matches_one(side, name); });
}

inline std::string inside(const std::string& modules, const std::string& name) {
  if (is_regex(modules)) return fmt::format("{}(?:{})\\.{}", kRegex, modules.substr(kRegex.size()), name);
  std::string text;
  for (const auto side : sides(modules)) text += fmt::format("{}{}{}{}", text.empty() ? "" : "|", side, side.empty() ? "" : ".", name);
  return text;
}

inline std::string closest(const std::string& pattern, const std::vector<std::string>& names) {
  std::vector<std::pair<size_t, std::string>> ranked;
  for (const auto& name : names) ranked.emplace_back(distance_of_any(pattern, name), name);
  std::ranges::stable_sort(ranked, [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(ranked.size(), 3); ++i) text += (i ? ", '" : "'") + ranked[i].second + "'";
  return ranked.empty() ? "(the module has none)" : text;
}

}  // namespace dtensor::detail

#pragma GCC visibility pop
