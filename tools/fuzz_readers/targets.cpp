// The readers of checkpoints that need no ranks, for AddressSanitizer: tools/fuzz_readers/build makes a program of them alone.
#include "tools/fuzz_bytes/target.hpp"

// A gigabyte is more than any input may ask for: it is reported, and ends the process.
extern "C" const char* __asan_default_options() { return "max_allocation_size_mb=1024:detect_leaks=0"; }

namespace dtensor::fuzz_bytes {

const std::vector<Target>& targets() {
  static const auto all = checkpoint_targets();
  return all;
}

}  // namespace dtensor::fuzz_bytes
