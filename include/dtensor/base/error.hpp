// Every failure of the library is a dtensor::Error. It is a c10::Error, so code that already catches
// libtorch's errors catches ours.
#pragma once

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor {

class Error : public c10::Error {
 public:
  Error(c10::SourceLocation where, std::string text) : c10::Error(where, std::move(text)) {}
};

// Throws Error with the text "[tag] text". `tag` is the operator or function that was called; the text states
// what happened, what was got, what was expected, and ends with "hint: ...". The calling rank is added to it.
[[noreturn]] void throw_error(std::string_view tag, std::string_view text);

// fail("redistribute", "cannot ... got {}; hint: ...", x)
template <class... Args>
[[noreturn]] void fail(std::string_view tag, fmt::format_string<Args...> text, Args&&... args) {
  throw_error(tag, fmt::format(text, std::forward<Args>(args)...));
}

// Throws when `ok` is false. The arguments are worked out in any case: where they cost more than a comparison and the
// call is frequent, write `if (!ok) fail(...)`.
template <class... Args>
void require(bool ok, std::string_view tag, fmt::format_string<Args...> text, Args&&... args) {
  if (!ok) [[unlikely]]
    throw_error(tag, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace dtensor

#pragma GCC visibility pop
