// How values of several ranks combine.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)

namespace dtensor {

// `norm2` is sqrt(sum of squares): what the norms of shards combine with.
enum class ReduceOp : uint8_t { sum, avg, product, min, max, norm2 };

const char* name(ReduceOp op);

}  // namespace dtensor

#pragma GCC visibility pop
