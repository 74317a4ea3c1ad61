#include "src/checkpoint/chosen.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>

namespace dtensor::checkpoints {

std::vector<Asked> asked_by(const std::vector<std::string>& only, const std::vector<std::string>& without,
                            const std::vector<std::string>& names, const std::string& of) {
  std::vector<Asked> asked;
  const auto add = [&](const char* option, const std::vector<std::string>& patterns) {
    for (const auto& pattern : patterns) {
      if (pattern == "*") continue;
      const bool any = std::ranges::any_of(names, [&](const auto& name) { return detail::matches(pattern, name); });
      if (any) asked.push_back({"", true});
      else
        asked.push_back({fmt::format("'{}' of .{} matches no name of {}; closest: {}", pattern, option, of,
                                     names.empty() ? "it has none" : detail::closest(pattern, names))});
    }
  };
  add("only", only);
  add("without", without);
  return asked;
}

void check_asked(const char* tag, const std::vector<Asked>& asked, const Everyone& everyone) {
  std::string own;
  for (const auto& each : asked) own += each.is_there ? '1' : '0';
  const auto all = everyone.gather(own);
  std::vector<std::string> texts;
  for (size_t i = 0; i < asked.size(); ++i) {
    const bool any = std::ranges::any_of(all, [&](const std::string& of_rank) { return i >= of_rank.size() || of_rank[i] == '1'; });
    if (!any) texts.push_back(asked[i].text);
  }
  if (texts.empty()) return;
  throw_error(tag, everyone.from_first(fmt::format("{}", fmt::join(texts, "; "))));
}

}  // namespace dtensor::checkpoints
