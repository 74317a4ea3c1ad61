// What a call says on standard error.
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

namespace dtensor::test {

inline std::string stderr_of(const std::function<void()>& call) {
  fflush(stderr);
  const int copy = dup(2), file = memfd_create("stderr", 0);
  dup2(file, 2);
  const auto restore = [&] {
    fflush(stderr);
    dup2(copy, 2);
    std::string said(static_cast<size_t>(lseek(file, 0, SEEK_END)), '\0');
    const auto count = pread(file, said.data(), said.size(), 0);
    close(file), close(copy);
    said.resize(count < 0 ? 0 : static_cast<size_t>(count));
    return said;
  };
  try {
    call();
  } catch (...) {
    restore();
    throw;
  }
  return restore();
}

}  // namespace dtensor::test
