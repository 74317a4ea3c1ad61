// What --self-test finds.
#include "tools/fuzz_bytes/target.hpp"

#include <dtensor/base/error.hpp>

#include <stdexcept>
#include <vector>

#include <signal.h>

namespace dtensor::fuzz_bytes {

namespace {

void read_wrongly(const std::string& bytes) {
  const auto first = bytes.empty() ? 0 : bytes[0] % 16;
  expect(first != 1, "it took a 1");
  if (first == 2) throw std::out_of_range("basic_string::substr");
  if (first == 3) raise(SIGSEGV);
  if (first == 4) {
    const std::vector<char> all(size_t{1} << 40);
    asm volatile("" : : "r"(all.data()) : "memory");  // or a compiler leaves the allocation out
  }
  require(first != 5, "wrong", "got a 5");
}

}  // namespace

Target wrong_target() {
  return {"wrong", "crashes, allocates, throws and takes what it must not",
          [] { return std::vector<std::string>{{16}, {32}}; }, read_wrongly};
}

}  // namespace dtensor::fuzz_bytes
