// What an exception of any type says.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::detail {

// Never empty: that is how a rank leaves that did not fail.
inline std::string text_of(const std::exception_ptr& error) {
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    text = e.what_without_backtrace();
  } catch (const std::exception& e) {
    text = e.what();
  } catch (...) {
    text = "an exception that is not a std::exception";
  }
  return text.empty() ? "an exception without a text" : text;
}

}  // namespace dtensor::detail

#pragma GCC visibility pop
