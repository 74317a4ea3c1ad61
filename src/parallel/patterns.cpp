#include <dtensor/parallel/patterns.hpp>

#include <dtensor/base/error.hpp>

#include <regex>

namespace dtensor::detail {

namespace {

// libstdc++'s own way follows one possibility after the other, which takes "(.*)*x" ages. This one follows all at once; it knows no
// back-references.
#ifdef __GLIBCXX__
constexpr auto kSteady = std::regex_constants::ECMAScript | std::regex_constants::__polynomial;
#else
constexpr auto kSteady = std::regex_constants::ECMAScript;
#endif

std::regex compiled(std::string_view text) {
  constexpr size_t kLongest = 4096;  // it is compiled by recursion
  require(text.size() <= kLongest, "pattern", "a regular expression has {} characters; expected at most {}", text.size(), kLongest);
  try {
    return std::regex(std::string(text), kSteady);
  } catch (const std::regex_error& error) {
    if (error.code() != std::regex_constants::error_complexity) throw;
  }
  return std::regex(std::string(text));
}

}  // namespace

bool matches_regex(std::string_view regex, std::string_view name) {
  try {
    return std::regex_match(std::string(name), compiled(regex));
  } catch (const std::regex_error& error) {
    fail("pattern", "'{}{}' is no regular expression: {}", kRegex, regex, error.what());
  }
}

}  // namespace dtensor::detail
