// Text and numbers in a row. It costs users less time to compile than fmt, of which each list of types is another instance.
#pragma once

#include <dtensor/base/error.hpp>

#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor::pipelining::detail {

class Word {
 public:
  Word(const char* text) : text_(text) {}
  Word(std::string_view text) : text_(text) {}
  Word(std::string text) : text_(std::move(text)) {}
  template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
  Word(Integer number) : text_(std::to_string(number)) {}

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

using Words = std::initializer_list<Word>;

inline std::string joined(Words words) {
  std::string text;
  for (const auto& word : words) text += word.text();
  return text;
}

// "33", "0.25"
inline std::string number(double value) { return fmt::format("{:.12g}", value); }

// Throws the library's error: what happened; what was expected; hint.
[[noreturn]] inline void refuse(Words words) { throw_error("pipeline", joined(words)); }

}  // namespace dtensor::pipelining::detail

#pragma GCC visibility pop
