#include "src/comm/flight/places.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include <elf.h>

namespace dtensor::comm::flight {

namespace {

constexpr size_t kMostFrames = 16;

struct Mapping {
  uint64_t begin, end;
  std::string path;
};

std::vector<Mapping> parse(const std::string& maps) {
  std::vector<Mapping> mappings;
  std::istringstream lines(maps);
  for (std::string line; std::getline(lines, line);) {
    uint64_t begin = 0, end = 0;
    int path = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %*s %n", &begin, &end, &path) == 2 && path > 0)
      mappings.push_back({begin, end, line.substr(path)});
  }
  return mappings;
}

// The address as addr2line takes it: from where the file was loaded, unless it can be loaded in one place only.
uint64_t in_file(uint64_t address, const Mapping& mapping, const std::vector<Mapping>& mappings) {
  Elf64_Ehdr header{};
  std::error_code ignored;
  if (std::filesystem::is_regular_file(mapping.path, ignored))  // a pipe would have it wait
    std::ifstream(mapping.path, std::ios::binary).read(reinterpret_cast<char*>(&header), sizeof header);
  if (header.e_type == ET_EXEC) return address;
  for (const auto& first : mappings) {
    if (first.path == mapping.path) return address - first.begin;
  }
  return address;
}

bool is_of_libraries(std::string_view path) {
  const auto file = path.substr(path.rfind('/') + 1);
  for (const auto* name :
       {"libtorch", "libc10", "libdtensor", "libc.", "libm.", "libstdc++", "libgcc", "libgomp", "libpthread", "libgloo", "ld-linux", "["}) {
    if (file.starts_with(name)) return true;
  }
  return false;
}

// For a shell: 'a b'.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char letter : text) result += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return result + "'";
}

std::string output_of(const std::string& command) {
  std::string text;
  char piece[4096];
  if (FILE* pipe = popen(command.c_str(), "r")) {
    for (size_t n; (n = fread(piece, 1, sizeof piece, pipe)) > 0;) text.append(piece, n);
    pclose(pipe);
  }
  return text;
}

// Of headers, what was inlined into the program is not where it called.
bool is_of_a_header(std::string_view file) {
  return file.find("/include/") != file.npos || file.starts_with("include/") || file.find("/bits/") != file.npos;
}

// "main::{lambda(int)#1}::operator()(int) const", "std::_Function_handler<void (), main::{lambda()#1}>::_M_invoke(...)": where the name of
// the function that has a lambda in it begins, and where it ends. Compilers write lambdas in several ways.
std::optional<std::pair<size_t, size_t>> enclosing_lambda(std::string_view function) {
  size_t end = function.npos;
  for (const auto* mark : {"::{lambda", "::<lambda", "::'lambda", "::$_"}) end = std::min(end, function.find(mark));
  if (end == function.npos) return std::nullopt;
  size_t begin = end;
  for (int depth = 0; begin > 0; --begin) {
    const char letter = function[begin - 1];
    if (letter == ')' || letter == '>') ++depth;
    if (letter == '(' || letter == '<') --depth;
    if (depth < 0 || (depth == 0 && letter == ' ')) break;
  }
  return std::pair(begin, end);
}

// Without arguments and what follows them. Those of templates stay.
std::string_view without_arguments(std::string_view function) {
  constexpr std::string_view kCall = "operator()";
  int depth = 0;
  for (size_t i = 0; i < function.size(); ++i) {
    if (function.substr(i).starts_with(kCall)) i += kCall.size();
    if (i >= function.size()) break;
    if (function[i] == '<') ++depth;
    if (function[i] == '>') --depth;
    if (depth == 0 && function[i] == '(') return function.substr(0, i);
  }
  return function;
}

// "step", "main::{lambda}"
std::string short_name(std::string function) {
  constexpr std::string_view kNoName = "(anonymous namespace)::";
  for (size_t at; (at = function.find(kNoName)) != function.npos;) function.erase(at, kNoName.size());
  if (const auto lambda = enclosing_lambda(function)) {
    const auto [begin, end] = *lambda;
    return std::string(without_arguments(function.substr(begin, end - begin))) + "::{lambda}";
  }
  return function == "operator()" ? "a lambda" : std::string(without_arguments(function));
}

// A line is "0x1f: step at train.cpp:42", or " (inlined by) main at train.cpp:7", which is of the same address.
std::map<uint64_t, Place> ask_addr2line(const std::string& path, const std::vector<uint64_t>& addresses) {
  std::string command = fmt::format("timeout 2 addr2line -afpiCe {}", quoted(path));
  for (const auto address : addresses) command += fmt::format(" {:#x}", address);
  std::map<uint64_t, Place> places;
  std::istringstream lines(output_of(command + " 2>/dev/null"));
  uint64_t address = 0;
  for (std::string line; std::getline(lines, line);) {
    constexpr std::string_view kInlined = " (inlined by) ";
    const bool inlined = line.starts_with(kInlined);
    const auto colon = line.find(": ");
    if (!inlined && colon == line.npos) continue;
    if (!inlined) address = std::strtoull(line.c_str(), nullptr, 16);
    const auto rest = line.substr(inlined ? kInlined.size() : colon + 2);
    const auto at = rest.rfind(" at "), number = rest.rfind(':');
    if (at == rest.npos || number == rest.npos || number < at || rest.compare(at + 4, 2, "??") == 0) continue;
    const auto file = rest.substr(at + 4, number - at - 4);
    const auto function = rest.substr(0, at);
    if (const auto place = places.find(address); place != places.end()) {
      if (place->second.function == "operator()" && enclosing_lambda(function)) place->second.function = function;
      continue;
    }
    if (is_of_a_header(file)) continue;
    places[address] = {file.substr(file.rfind('/') + 1), rest.substr(number + 1, rest.find(' ', number) - number - 1), function};
  }
  return places;
}

}  // namespace

std::string Place::str() const {
  return fmt::format("{}:{}{}", file, line, function.empty() ? "" : " (in " + short_name(function) + ")");
}

std::vector<Place> places_of(const std::vector<uint64_t>& stack, const std::string& maps) {
  const auto mappings = parse(maps);
  std::vector<std::pair<const Mapping*, uint64_t>> frames;
  std::map<std::string, std::vector<uint64_t>> wanted;
  for (const auto after_call : stack) {
    const auto address = after_call - 1;  // in the call
    for (const auto& mapping : mappings) {
      if (address < mapping.begin || address >= mapping.end || is_of_libraries(mapping.path) || mapping.path.empty()) continue;
      frames.emplace_back(&mapping, in_file(address, mapping, mappings));
      wanted[mapping.path].push_back(frames.back().second);
    }
    if (frames.size() == kMostFrames) break;
  }
  std::map<std::string, std::map<uint64_t, Place>> found;
  for (const auto& [path, addresses] : wanted) found[path] = ask_addr2line(path, addresses);
  std::vector<Place> places, unknown;
  for (const auto& [mapping, address] : frames) {
    const auto& of_file = found[mapping->path];
    if (const auto place = of_file.find(address); place != of_file.end()) places.push_back(place->second);
    else unknown.push_back({mapping->path.substr(mapping->path.rfind('/') + 1), fmt::format("{:#x}", address), ""});
  }
  return places.empty() ? unknown : places;
}

}  // namespace dtensor::comm::flight
