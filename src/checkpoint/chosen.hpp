// Which names of a state are saved or loaded.
#pragma once

#include "src/checkpoint/everyone.hpp"

#include <dtensor/parallel/patterns.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace dtensor::checkpoints {

// `options`: SaveOptions or LoadOptions.
template <class Options>
bool is_chosen(const std::string& name, const Options& options) {
  const auto matches = [&](const std::string& pattern) { return detail::matches(pattern, name); };
  return std::ranges::any_of(options.only, matches) && std::ranges::none_of(options.without, matches);
}

// Something that an option asks for, and whether this rank has anything of it.
struct Asked {
  std::string text;  // the error, where no rank has
  bool is_there = false;
};

// For each pattern of .only and .without: "'modle.*' of .only matches no name of the state; closest: ...". `names`: this rank's.
std::vector<Asked> asked_by(const std::vector<std::string>& only, const std::vector<std::string>& without,
                            const std::vector<std::string>& names, const std::string& of);

// Throws, on every rank, for what no rank has. Every rank calls it, with the same options.
void check_asked(const char* tag, const std::vector<Asked>& asked, const Everyone& everyone);

}  // namespace dtensor::checkpoints
