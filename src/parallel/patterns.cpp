#include "src/parallel/patterns.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace dtensor::detail {

namespace {

bool matches_one(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') {
    for (size_t skip = 0; skip <= name.size(); ++skip) {
      if (matches_one(pattern.substr(1), name.substr(skip))) return true;
    }
    return false;
  }
  return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) && matches_one(pattern.substr(1), name.substr(1));
}

// How many letters to change, add or leave out between two names (Levenshtein, 1966).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) {
  for (size_t bar; (bar = pattern.find('|')) != std::string_view::npos; pattern.remove_prefix(bar + 1)) {
    if (matches_one(pattern.substr(0, bar), name)) return true;
  }
  return matches_one(pattern, name);
}

std::string closest(const std::string& pattern, const std::vector<std::string>& names) {
  std::vector<std::pair<size_t, std::string>> ranked;
  for (const auto& name : names) ranked.emplace_back(distance(pattern, name), name);
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(ranked.size(), 3); ++i) text += (i ? ", '" : "'") + ranked[i].second + "'";
  return ranked.empty() ? "(the module has none)" : text;
}

}  // namespace dtensor::detail
