// Where threads sleep until another rank wakes them, also one of another process. It may lie in memory that processes share: zeros are one.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace dtensor::comm {

struct alignas(64) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;

  // Wakes who sleeps here, if anybody does.
  void ring() {
    if (sleepers.load() > 0) ring_anyway();
  }
  void ring_anyway();
  // Sleeps unless it was rung since `rings` was `seen`.
  void sleep(uint32_t seen, std::chrono::nanoseconds longest);
};

}  // namespace dtensor::comm
