#include "src/launch/memory.hpp"

#include "src/launch/environment.hpp"
#include "src/launch/large_blocks.hpp"

#include <climits>
#include <cstdlib>
#include <initializer_list>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace dtensor::detail {

void keep_freed_memory() {
#ifdef __GLIBC__
  if (read_environment("DTENSOR_KEEP_MEMORY") == "0") return;
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(name)) return;
  }
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
  keep_large_blocks();
#endif
}

}  // namespace dtensor::detail
