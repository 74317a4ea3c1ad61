// Which missed placements say something new.
#include "tools/opcheck/examine.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace dtensor::opcheck {

namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

// "(P(sum)), (S(0))" -> {"(P(sum))", "(S(0))"}
Words by_operand(const std::string& placements) {
  Words words;
  int depth = 0;
  for (const char c : placements) {
    if (c == '(' && depth++ == 0) words.emplace_back();
    if (depth > 0) words.back() += c;
    if (c == ')') --depth;
  }
  return words;
}

// Whether `other` is the same with some operands whole: who moves nothing there moves nothing here that counts.
bool implies(const Words& other, const Words& words) {
  if (other == words || other.size() != words.size()) return false;
  for (size_t i = 0; i < words.size(); ++i) {
    if (other[i] != words[i] && other[i] != "(R)") return false;
  }
  return true;
}

// aten::add_.Tensor -> aten::add.Tensor; empty: it is no in-place form.
std::string functional_name(const std::string& name) {
  const auto dot = std::min(name.find('.'), name.size());
  return name[dot - 1] == '_' && name[dot - 2] != '_' ? name.substr(0, dot - 1) + name.substr(dot) : std::string();
}

}  // namespace

void keep_simplest_misses(std::vector<Json>& results) {
  std::map<std::string, std::vector<Words>> missed;
  for (const auto& result : results) {
    if (!result.contains("missed")) continue;
    for (const auto& m : result["missed"]) missed[result["name"]].push_back(by_operand(m["placements"]));
  }
  for (auto& result : results) {
    if (!result.contains("missed")) continue;
    const std::string name = result["name"];
    const auto& own = missed[name];
    const auto functional = missed.find(functional_name(name));
    std::set<Words> seen;
    Json kept = Json::array();
    for (const auto& m : result["missed"]) {
      const auto words = by_operand(m["placements"]);
      const bool implied = std::ranges::any_of(own, [&](const Words& other) { return implies(other, words); });
      const bool twice = functional != missed.end() && std::ranges::count(functional->second, words) > 0;
      if (!implied && !twice && seen.insert(words).second) kept.push_back(m);
    }
    result["missed"] = std::move(kept);
  }
}

}  // namespace dtensor::opcheck
