#include "src/comm/bell.hpp"

#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dtensor::comm {

void Bell::ring_anyway() {
  rings.fetch_add(1);
  syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(uint32_t seen, std::chrono::nanoseconds longest) {
  const timespec time{static_cast<time_t>(longest.count() / 1'000'000'000), static_cast<long>(longest.count() % 1'000'000'000)};
  syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &time, nullptr, 0);
}

}  // namespace dtensor::comm
