// Lines on standard error, which never fail.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor::detail {

// Writes a text to standard error, in one piece, so that the lines of ranks do not mix. Where nobody reads it (a closed pipe, a full disk),
// the program goes on: fmt::print would throw there, often in the handler of another error.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = fmt::format(format, std::forward<Args>(args)...);
  [[maybe_unused]] const auto written = std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace dtensor::detail

#pragma GCC visibility pop
