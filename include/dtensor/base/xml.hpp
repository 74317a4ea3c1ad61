// Text inside XML, such as an SVG picture's.
#pragma once

#include <string>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor {

// The same text, in which &, < and > are no markup.
inline std::string xml_escaped(std::string_view text) {
  std::string escaped;
  for (const char c : text) escaped += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  return escaped;
}

}  // namespace dtensor

#pragma GCC visibility pop
