// Feeds a reader, each batch of inputs in a process of its own.
#pragma once

#include "tools/fuzz_bytes/target.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace dtensor::fuzz_bytes {

struct RunOptions {
  uint64_t seed = 1;
  int64_t runs = 2000;
  double seconds = 0;        // 0: as long as it takes
  std::string folder = ".";  // for inputs at fault
};

struct Tally {
  int64_t read = 0, refused = 0, faults = 0;
  size_t kinds = 0;  // of faults
};

// Prints each fault of a new kind, and where its input is.
Tally run(const Target& target, const RunOptions& options);

// Runs it on the bytes of a file, and prints the outcome. Whether there was no fault.
bool run_file(const Target& target, const std::string& file);

}  // namespace dtensor::fuzz_bytes
