// Compiles DTENSOR_KERNEL, a file of templates, for each instruction set, in a namespace of its own, with a vector's bytes in
// DTENSOR_VECTOR_BYTES. DTENSOR_BEST(f, ...) calls the f of the best that this processor has. To be included within a namespace, once:
//
//   #define DTENSOR_KERNEL "src/nn/swiglu_kernel.inl"
//   #include <dtensor/base/vectors/instruction_sets.inl>
//   void gate(const float* g, const float* u, float* y, int64_t count) { DTENSOR_BEST(gate_all, g, u, y, count); }
//
#define DTENSOR_INLINE inline __attribute__((always_inline))
#define DTENSOR_INLINE_LAMBDA __attribute__((always_inline))
#pragma GCC push_options
#pragma GCC optimize("O3,fp-contract=fast")

namespace generic {
#define DTENSOR_VECTOR_BYTES 16
#include DTENSOR_KERNEL
#undef DTENSOR_VECTOR_BYTES
}  // namespace generic

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define DTENSOR_VECTOR_BYTES 32
#include DTENSOR_KERNEL
#undef DTENSOR_VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace avx512 {
#define DTENSOR_VECTOR_BYTES 64
#include DTENSOR_KERNEL
#undef DTENSOR_VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options
#endif

#pragma GCC pop_options

inline bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

inline bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

#if defined(__x86_64__)
#define DTENSOR_BEST(f, ...) (has_avx512() ? avx512::f(__VA_ARGS__) : has_avx2() ? avx2::f(__VA_ARGS__) : generic::f(__VA_ARGS__))
#else
#define DTENSOR_BEST(f, ...) generic::f(__VA_ARGS__)
#endif
