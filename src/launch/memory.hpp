// Keeps freed memory of the C library.
#pragma once

namespace dtensor::detail {

// Makes the C library keep freed memory. A training step allocates what the step before freed. Memory that was returned to the system in
// between is faulted in again page by page, under one lock for all ranks that are threads. Does nothing with DTENSOR_KEEP_MEMORY=0, if the
// environment sets up the allocator (MALLOC_TRIM_THRESHOLD_ and its like, GLIBC_TUNABLES), or with another allocator than glibc's.
void keep_freed_memory();

}  // namespace dtensor::detail
