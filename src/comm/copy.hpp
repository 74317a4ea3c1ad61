// Copies of bytes, for results of any size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtensor::comm {

// A result of this many bytes is not found in a cache afterwards.
constexpr int64_t kLargeBytes = 8 << 20;

// memcpy; into a part of a large result past the caches, which does not read what is overwritten and leaves the caches to others.
void copy_bytes(void* to, const void* from, size_t bytes, bool large);

}  // namespace dtensor::comm
