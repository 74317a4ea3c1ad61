#include <dtensor/parallel/patterns.hpp>

#include <dtensor/base/error.hpp>

#include <regex>

namespace dtensor::detail {

bool matches_regex(std::string_view regex, std::string_view name) {
  try {
    return std::regex_match(std::string(name), std::regex(std::string(regex)));
  } catch (const std::regex_error& error) {
    fail("pattern", "'{}{}' is no regular expression: {}", kRegex, regex, error.what());
  }
}

}  // namespace dtensor::detail
