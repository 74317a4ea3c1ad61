// Reads the memory of another process of this host, so long data is copied only once, by the kernel (process_vm_readv(2)).
#pragma once

#include <cstdint>

#include <sys/types.h>

namespace dtensor::comm::shared_memory {

// Lets the processes that this one's parent, a launcher, has started read its memory, where the system asks for that (Yama's
// ptrace_scope 1). DTENSOR_DIRECT_READS=0 in the environment: nobody is let, and can_read() is false.
void allow_reads();

// Whether the `bytes` at `address` of `process` can be read, and are those at `expected`.
bool can_read(pid_t process, uint64_t address, const void* expected, int64_t bytes);

// Copies `bytes` from `address` of `process`. Returns 0, or the errno of what went wrong.
int read_memory(pid_t process, uint64_t address, void* to, int64_t bytes);

}  // namespace dtensor::comm::shared_memory
