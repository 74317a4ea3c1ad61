// Catch2, version 2 or 3. DTENSOR_SKIP(reason) ends a test case and counts it as skipped; version 2 has no such thing.
#pragma once

#include <string>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

namespace dtensor_tests {
// Why the running test case was skipped; empty when it was not.
inline std::string skip_reason;
}  // namespace dtensor_tests

#define DTENSOR_SKIP(reason)                \
  do {                                      \
    dtensor_tests::skip_reason = (reason);  \
    SUCCEED(dtensor_tests::skip_reason);    \
    return;                                 \
  } while (false)
