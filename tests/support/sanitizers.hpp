// Whether the tests are built with a sanitizer that takes time and memory of its own (tools/test --sanitize).
#pragma once

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace dtensor::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// What a thread allocates while one lives is no leak: for libraries that do not free what they made when they throw.
struct IgnoredLeaks {
  IgnoredLeaks() {
#ifdef __SANITIZE_ADDRESS__
    __lsan_disable();
#endif
  }
  ~IgnoredLeaks() {
#ifdef __SANITIZE_ADDRESS__
    __lsan_enable();
#endif
  }
  IgnoredLeaks(const IgnoredLeaks&) = delete;
  IgnoredLeaks& operator=(const IgnoredLeaks&) = delete;
};

}  // namespace dtensor::test
