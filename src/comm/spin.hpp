// A short wait before a thread goes to sleep.
#pragma once

namespace dtensor::comm {

// Returns whether done() became true within a few microseconds, about what it costs to be woken. Without giving the core away: a thread that
// yields on a busy machine gets it back much later than one that sleeps and is woken.
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

}  // namespace dtensor::comm
