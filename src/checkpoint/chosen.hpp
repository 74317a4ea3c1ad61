// Which names of a state are saved or loaded.
#pragma once

#include <dtensor/parallel/patterns.hpp>

#include <algorithm>
#include <string>

namespace dtensor::checkpoints {

// `options`: SaveOptions or LoadOptions.
template <class Options>
bool is_chosen(const std::string& name, const Options& options) {
  const auto matches = [&](const std::string& pattern) { return detail::matches(pattern, name); };
  return std::ranges::any_of(options.only, matches) && std::ranges::none_of(options.without, matches);
}

}  // namespace dtensor::checkpoints
