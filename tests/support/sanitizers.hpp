// Whether the tests are built with a sanitizer that takes time and memory of its own (tools/test --sanitize).
#pragma once

namespace dtensor::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace dtensor::test
