// Reads "dp=2,tp=2": the sizes and names of a mesh's dimensions, as written on a command line.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

struct MeshOption {
  std::string text;  // as written
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
};

// The parts of `text` between separators; one empty part for an empty text.
inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// Parses NAME=SIZE[,NAME=SIZE...]; names are among `known`, each at most once, sizes at least 1. Throws
// std::invalid_argument saying what is wrong and the expected form.
inline MeshOption parse_mesh(std::string_view text, const std::vector<std::string>& known) {
  std::string form = "expected NAME=SIZE[,NAME=SIZE...], like dp=2,tp=2, with the names";
  for (const auto& name : known) form += " " + name;
  auto fail = [&](const std::string& what) {
    throw std::invalid_argument("cannot read the mesh '" + std::string(text) + "': " + what + "; " + form);
  };
  MeshOption mesh{std::string(text), {}, {}};
  for (const auto part : split(text, ',')) {
    const auto equals = part.find('=');
    if (equals == part.npos) fail("'" + std::string(part) + "' has no '='");
    const std::string name(part.substr(0, equals)), number(part.substr(equals + 1));
    if (std::ranges::find(known, name) == known.end()) fail("unknown dimension '" + name + "'");
    if (std::ranges::find(mesh.names, name) != mesh.names.end()) fail("'" + name + "' is repeated");
    int64_t size = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), size);
    if (error != std::errc{} || end != number.data() + number.size()) fail("'" + number + "' is not a whole number");
    if (size < 1) fail("'" + name + "' has size " + number + ", less than 1");
    mesh.names.push_back(name);
    mesh.sizes.push_back(size);
  }
  return mesh;
}

// Parses meshes separated by ';'.
inline std::vector<MeshOption> parse_meshes(std::string_view text, const std::vector<std::string>& known) {
  std::vector<MeshOption> meshes;
  for (const auto part : split(text, ';')) meshes.push_back(parse_mesh(part, known));
  return meshes;
}
