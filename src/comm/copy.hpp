// Copies of bytes, for results of any size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtensor::comm {

// A result of this many bytes does not stay in a cache.
constexpr int64_t kLargeBytes = 8 << 20;

// memcpy. Writes to a `large` result go past the caches: the old contents are not read first, and the caches keep other data.
void copy_bytes(void* to, const void* from, size_t bytes, bool large);

}  // namespace dtensor::comm
