#include "src/checkpoint/joined_parts.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>

#include <iterator>

namespace dtensor::checkpoints {

void JoinedParts::add(const std::string& part, Contents contents) {
  const auto join = [&](auto& all, auto& own) {
    for (const auto& [name, what] : own) {
      const auto [entry, is_new] = parts_.try_emplace(name, part);
      if (is_new) continue;
      met_.push_back(entry->second == part ? fmt::format("'{}' is two things in the part '{}'", name, part)
                                           : fmt::format("'{}' is in the part '{}' and in the part '{}'", name, entry->second, part));
    }
    all.merge(own);
  };
  join(all_.tensors, contents.tensors);
  join(all_.values, contents.values);
  join(all_.same_as, contents.same_as);
  all_.problems.insert(all_.problems.end(), std::make_move_iterator(contents.problems.begin()),
                       std::make_move_iterator(contents.problems.end()));
}

Contents JoinedParts::take(const char* tag) {
  constexpr size_t kMost = 20;
  const auto all = met_.size();
  if (all > kMost) met_.resize(kMost);
  require(all == 0, tag, "names meet: {}{}; hint: give one of the parts another name", fmt::join(met_, ", "), all > kMost ? ", ..." : "");
  return std::move(all_);
}

std::vector<std::string> names_in(const Contents& contents) {
  std::vector<std::string> names;
  const auto add = [&](const auto& named) {
    for (const auto& [name, what] : named) names.push_back(name);
  };
  add(contents.tensors);
  add(contents.values);
  add(contents.same_as);
  return names;
}

}  // namespace dtensor::checkpoints
