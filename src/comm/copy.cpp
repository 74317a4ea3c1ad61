#include "src/comm/copy.hpp"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dtensor::comm {

void copy_bytes(void* to, const void* from, size_t bytes, bool large) {
#if defined(__SSE2__)
  if (large && bytes >= 1024) {
    auto* target = static_cast<char*>(to);
    const auto* source = static_cast<const char*>(from);
    size_t done = -reinterpret_cast<uintptr_t>(to) % 16;
    std::memcpy(target, source, done);
    for (; done + 64 <= bytes; done += 64) {
      for (size_t i = done; i < done + 64; i += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
      }
    }
    _mm_sfence();
    std::memcpy(target + done, source + done, bytes - done);
    return;
  }
#endif
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace dtensor::comm
