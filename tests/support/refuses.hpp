// That a call is refused, and in which words.
#pragma once

#include <dtensor/base/error.hpp>

#include <functional>
#include <string>

namespace dtensor::test {

// Throws, unless `call` throws an error of the library that says `text`.
inline void refuses(const std::string& text, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    require(std::string(error.what()).find(text) != std::string::npos, "test", "expected '{}' in: {}", text,
            error.what_without_backtrace());
    return;
  }
  fail("test", "no error with '{}'", text);
}

}  // namespace dtensor::test
