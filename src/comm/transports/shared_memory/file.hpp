// Anonymous files whose memory processes share.
#pragma once

#include <cstdint>

#include <sys/types.h>

namespace dtensor::comm::shared_memory {

// Whether the file has room for these bytes from now on, and this process may have it so long. Never more than what is there: a page that
// cannot be had would be a SIGBUS on first use, and a file above its limit a SIGXFSZ. Sets errno.
bool grow(int fd, int64_t offset, int64_t bytes);

// Null, and errno, where that cannot be.
void* map(int fd, int64_t offset, int64_t bytes);

// The file that another process of this host has open as `fd`. Below 0, and errno, where that cannot be.
int open_of(pid_t process, int fd);

}  // namespace dtensor::comm::shared_memory
