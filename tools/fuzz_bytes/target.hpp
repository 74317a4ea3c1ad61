// The readers that fuzz-bytes feeds: of files, of messages and of texts.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

namespace dtensor::fuzz_bytes {

struct Target {
  std::string name, what;
  // Inputs that the library itself makes. The first is valid; the others may be for other readers.
  std::vector<std::string> (*valid)();
  // Runs the reader. What it throws is its answer.
  void (*read)(const std::string& bytes);
  // Texts that mean something to it.
  std::vector<std::string> words{};
};

const std::vector<Target>& targets();

std::vector<Target> file_targets();
std::vector<Target> step_targets();
std::vector<Target> checkpoint_targets();
std::vector<Target> zoo_targets();
std::vector<Target> flight_targets();
std::vector<Target> message_targets();
std::vector<Target> exchange_targets();
std::vector<Target> text_targets();

// A reader that does all that a reader must not do.
Target wrong_target();

// Thrown where a reader took what it must not take.
struct Wrong {
  std::string text;
};

template <class... Args>
void expect(bool ok, fmt::format_string<Args...> text, Args&&... args) {
  if (!ok) throw Wrong{fmt::format(text, std::forward<Args>(args)...)};
}

// A folder of this run, which it removes at its end.
const std::string& scratch();

void write_bytes(const std::string& file, std::string_view bytes);
std::string read_bytes(const std::string& file);

// The bytes of an object, and an object of bytes: of those that are missing, zeroes.
template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class T>
T object_of(std::string bytes) {
  T value;
  bytes.resize(sizeof value);
  bytes.copy(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

}  // namespace dtensor::fuzz_bytes
