#pragma once

namespace dtensor::detail {

// Has the C library keep memory that is freed. A training step allocates what the step before freed; memory that went back to the system in
// between is faulted in again page by page, by ranks that are threads under one lock. Left alone where
// the environment sets the allocator (MALLOC_TRIM_THRESHOLD_ and its like, GLIBC_TUNABLES), and other allocators than glibc's.
void keep_freed_memory();

}  // namespace dtensor::detail
