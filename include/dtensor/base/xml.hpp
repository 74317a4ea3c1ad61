// Text in pictures.
#pragma once

#include <string>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor {

// `text` as it stands between the tags of an SVG; > may stay there.
inline std::string xml_escaped(std::string_view text) {
  std::string safe;
  for (const char c : text) safe += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  return safe;
}

}  // namespace dtensor

#pragma GCC visibility pop
