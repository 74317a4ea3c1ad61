// A short wait before a thread goes to sleep.
#pragma once

#include <chrono>
#include <thread>

namespace dtensor::comm {

// Returns whether done() became true within a few microseconds, without giving the core away.
template <class Done>
bool spin(Done done) {
  for (int i = 0; i < 256; ++i) {
    if (done()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

// The same for as long as it may take to be woken: tens of microseconds where a virtual machine's core goes idle. Gives up where somebody else
// wants the core, which shows in a yield that takes its time: who goes on yielding there gets the core back much later than who sleeps.
template <class Done>
bool stay_awake(Done done) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLongest = std::chrono::microseconds(50), kYield = std::chrono::microseconds(20);
  for (const auto begin = Clock::now();;) {
    if (spin(done)) return true;
    const auto before = Clock::now();
    if (before - begin > kLongest) return false;
    std::this_thread::yield();
    if (Clock::now() - before > kYield) return done();
  }
}

}  // namespace dtensor::comm
