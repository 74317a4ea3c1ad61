// Philox 4x32-10, a counter-based generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Plain
// C++ for host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DTENSOR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DTENSOR_HOST_DEVICE inline __attribute__((always_inline))
#endif

#pragma GCC visibility push(default)

namespace dtensor::rng {

struct PhiloxBlock {
  uint32_t word[4];
};

// The block at a counter of 128 bits.
DTENSOR_HOST_DEVICE PhiloxBlock philox4x32_10(uint64_t key, uint64_t low, uint64_t high) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = static_cast<uint32_t>(low), c1 = static_cast<uint32_t>(low >> 32);
  uint32_t c2 = static_cast<uint32_t>(high), c3 = static_cast<uint32_t>(high >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace dtensor::rng

#pragma GCC visibility pop
