#include "src/comm/transports/shared_memory/peer_memory.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

namespace dtensor::comm::shared_memory {

namespace {

bool is_wanted() {
  const char* value = std::getenv("DTENSOR_DIRECT_READS");
  return !value || std::string_view(value) != "0";
}

}  // namespace

void allow_reads() {
  const pid_t launcher = getppid();
  if (is_wanted() && launcher > 1) prctl(PR_SET_PTRACER, launcher, 0, 0, 0);  // an error where there is no such guard
}

bool can_read(pid_t process, uint64_t address, const void* expected, int64_t bytes) {
  std::vector<char> there(static_cast<size_t>(bytes));
  return is_wanted() && read_memory(process, address, there.data(), bytes) == 0 && std::memcmp(there.data(), expected, there.size()) == 0;
}

int read_memory(pid_t process, uint64_t address, void* to, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const auto left = static_cast<size_t>(bytes - done);
    const iovec here{static_cast<char*>(to) + done, left}, there{reinterpret_cast<void*>(address + static_cast<uint64_t>(done)), left};
    const ssize_t read = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (read <= 0) return read < 0 ? errno : EFAULT;
    done += read;
  }
  return 0;
}

}  // namespace dtensor::comm::shared_memory
