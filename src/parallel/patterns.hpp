// Patterns of fully qualified names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace dtensor::detail {

// `*` matches any run of characters, `?` one, and `a|b` either side; what follows "re:" is a regular expression (ECMAScript's) of whole names.
// Throws for one that is none.
bool matches(std::string_view pattern, std::string_view name);

// The pattern of what is called `name` in modules of a pattern: "a|b" and "weight" give "a.weight|b.weight".
std::string inside(const std::string& modules, const std::string& name);

// The three names that are most like a pattern, for messages.
std::string closest(const std::string& pattern, const std::vector<std::string>& names);

}  // namespace dtensor::detail
