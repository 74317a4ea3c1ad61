// Short waits before a thread goes to sleep.
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

namespace detail {
// Until this time the thread assumes that others want its core.
inline constinit thread_local std::chrono::steady_clock::time_point crowded_until{};
}  // namespace detail

// Like spin(), but for as long as waking a thread may take: tens of microseconds where a virtual machine's core goes idle. It yields
// meanwhile, so ranks that share a core take turns. If another program wants the core, a yield gives it a whole time slice, milliseconds; a
// sleeping thread gets the core back as soon as it is woken. So after a yield that took that long, the thread does not yield for a while,
// and sleeps early.
template <class Done>
bool stay_awake(Done done) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::microseconds;
  constexpr auto kLongest = microseconds(50), kLongestInCrowd = microseconds(10), kLongYield = microseconds(20), kSlice = microseconds(500);
  constexpr auto kWhile = std::chrono::seconds(1);
  const auto begin = Clock::now();
  const bool yields = begin >= detail::crowded_until;
  for (;;) {
    if (spin(done)) return true;
    const auto before = Clock::now();
    if (before - begin > (yields ? kLongest : kLongestInCrowd)) return false;
    if (!yields) continue;
    std::this_thread::yield();
    const auto after = Clock::now();
    if (after - before > kSlice) detail::crowded_until = after + kWhile;
    if (after - before > kLongYield) return done();
  }
}

}  // namespace dtensor::comm
