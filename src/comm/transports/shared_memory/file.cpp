#include "src/comm/transports/shared_memory/file.hpp"

#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>

namespace dtensor::comm::shared_memory {

bool grow(int fd, int64_t offset, int64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
  if (limit.rlim_cur < static_cast<rlim_t>(offset + bytes)) {
    errno = EFBIG;
    return false;
  }
  int error = 0;
  do error = posix_fallocate(fd, offset, bytes);
  while (error == EINTR);
  errno = error;
  return error == 0;
}

void* map(int fd, int64_t offset, int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  return memory == MAP_FAILED ? nullptr : memory;
}

int open_of(pid_t process, int fd) { return open(fmt::format("/proc/{}/fd/{}", process, fd).c_str(), O_RDWR | O_CLOEXEC); }

}  // namespace dtensor::comm::shared_memory
