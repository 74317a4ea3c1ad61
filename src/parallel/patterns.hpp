// Patterns of fully qualified names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace dtensor::detail {

// `*` matches any run of characters, `?` one, and `a|b` either side.
bool matches(std::string_view pattern, std::string_view name);

// The three names that are most like a pattern, for messages.
std::string closest(const std::string& pattern, const std::vector<std::string>& names);

}  // namespace dtensor::detail
