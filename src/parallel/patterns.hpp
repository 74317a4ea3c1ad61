// Patterns of fully qualified names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace dtensor::detail {

// Whether `name` matches. `*` matches any run of characters, `?` one, and `a|b` either side; "re:" begins a regular expression
// (ECMAScript's) of whole names. Throws for an invalid regular expression.
bool matches(std::string_view pattern, std::string_view name);

// The pattern for `name` inside the modules that `modules` matches: "a|b" and "weight" give "a.weight|b.weight".
std::string inside(const std::string& modules, const std::string& name);

// The three names that resemble a pattern most, for messages.
std::string closest(const std::string& pattern, const std::vector<std::string>& names);

}  // namespace dtensor::detail
