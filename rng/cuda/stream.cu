// libtorch's draws, element by element: the numbers that its kernels would give to an element of the whole tensor, wherever it lies.
// Compiled with the flags and against the headers of libtorch, whose transformations of random numbers differ between versions.
#include "rng/cuda/launch.cuh"

#include <dtensor/compat.hpp>

#include <ATen/Dispatch.h>
#include <ATen/core/TransformationHelper.h>

#include <curand_kernel.h>

#include <type_traits>

namespace dtensor::rng::cuda {

namespace {

using State = curandStatePhilox4_32_10_t;
namespace transformation = at::transformation;

// -- What a thread gets of a call of the generator ---------------------------------------------------------------------------

struct Uniform4 {
  __device__ float4 operator()(State* state) const { return curand_uniform4(state); }
};
struct Uniform2 {
  __device__ double2 operator()(State* state) const { return curand_uniform2_double(state); }
};
struct Normal4 {
  __device__ float4 operator()(State* state) const { return curand_normal4(state); }
};
struct Normal2 {
  __device__ double2 operator()(State* state) const { return curand_normal2_double(state); }
};
struct Words4 {
  __device__ uint4 operator()(State* state) const { return curand4(state); }
};
struct Words2 {
  __device__ ulonglong2 operator()(State* state) const {
    const uint4 words = curand4(state);
    return {static_cast<uint64_t>(words.x) << 32 | words.y, static_cast<uint64_t>(words.z) << 32 | words.w};
  }
};

template <class Four>
__device__ auto component(const Four& numbers, int index) {
  if constexpr (requires { numbers.w; }) {
    return index == 0 ? numbers.x : index == 1 ? numbers.y : index == 2 ? numbers.z : numbers.w;
  } else {
    return index == 0 ? numbers.x : numbers.y;
  }
}

template <class T, class Call, class Transform>
__global__ void fill(T* to, int64_t count, PartIndex part, Words words, Call call, Transform transform) {
  for (int64_t i = first_element(); i < count; i += all_threads()) {
    const Place place = place_of(part.global(i), words.launch);
    State state;
    curand_init(words.seed, place.subsequence, words.offset + 4 * place.call, &state);
    to[i] = transform(component(call(&state), place.component));
  }
}

template <class T, class Call, class Transform>
bool launch(const Elements& elements, const Words& words, Call call, Transform transform) {
  launch_over(elements, fill<T, Call, Transform>, words, call, transform);
  return true;
}

// -- Its transformations -----------------------------------------------------------------------------------------------------

// From (0, 1] to [from, to).
template <class T, class C>
struct Uniform {
  T from, to;
  C range;
  Uniform(double a, double b) : from(static_cast<T>(a)), to(static_cast<T>(b)), range(static_cast<C>(to - from)) {}
  __device__ T operator()(C number) const {
#if DTENSOR_TORCH_AT_LEAST(2, 1)
    const T value = static_cast<T>(number * range + from);
    return value == to ? from : value;
#else
    const C begun = number == static_cast<C>(1) ? static_cast<C>(0) : number;
    return static_cast<T>(begun * range + from);
#endif
  }
};

template <class T, class C>
struct Normal {
  C mean, std;
  __device__ C number(C z) const { return transformation::normal<C>(z, mean, std); }
  __device__ T operator()(C z) const { return static_cast<T>(number(z)); }
};
template <class T, class C>
struct LogNormal : Normal<T, C> {
  __device__ T operator()(C z) const { return static_cast<T>(transformation::log_normal<C>(this->number(z))); }
};
template <class T, class C>
struct Exponential {
  C lambda;
  __device__ T operator()(C number) const { return static_cast<T>(transformation::exponential<C>(number, lambda)); }
};
template <class T, class C>
struct Cauchy {
  C median, sigma;
  __device__ T operator()(C number) const { return static_cast<T>(transformation::cauchy<C>(number, median, sigma)); }
};
template <class T, class C>
struct Geometric {
  double p;
  __device__ T operator()(C number) const { return static_cast<T>(transformation::geometric<C>(number, p)); }
};
template <class T, class C>
struct Bernoulli {
  double p;
  __device__ T operator()(C number) const { return static_cast<T>(transformation::bernoulli<C>(number, p)); }
};
template <class T, class Word>
struct WholeFrom {
  uint64_t range;
  int64_t from;
  __device__ T operator()(Word word) const { return transformation::uniform_int_from_to<T>(word, range, from); }
};
template <class T, class Word>
struct Whole {
  __device__ T operator()(Word word) const { return transformation::uniform_int<T>(word); }
};

// -- By dtype ----------------------------------------------------------------------------------------------------------------

// C: the type that T is computed in.
template <class T, class C, class UniformCall, class NormalCall>
bool draw_floating(const Elements& e, const Words& words, const Numbers& n) {
  const auto a = static_cast<C>(n.a), b = static_cast<C>(n.b);
  switch (n.kind) {
    case Kind::uniform: return launch<T>(e, words, UniformCall(), Uniform<T, C>(n.a, n.b));
    case Kind::normal: return launch<T>(e, words, NormalCall(), Normal<T, C>{a, b});
    case Kind::log_normal: return launch<T>(e, words, NormalCall(), LogNormal<T, C>{{a, b}});
    case Kind::exponential: return launch<T>(e, words, UniformCall(), Exponential<T, C>{a});
    case Kind::cauchy: return launch<T>(e, words, UniformCall(), Cauchy<T, C>{a, b});
    default: return false;
  }
}

template <class T>
bool draw_any(const Elements& e, const Words& words, const Numbers& n) {
  using C = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using UniformCall = std::conditional_t<std::is_same_v<T, double>, Uniform2, Uniform4>;
  switch (n.kind) {
    case Kind::geometric: return launch<T>(e, words, UniformCall(), Geometric<T, C>{n.a});
    case Kind::bernoulli: return launch<T>(e, words, UniformCall(), Bernoulli<T, C>{n.a});
    case Kind::dropout:  // draws floats, whatever is dropped; wide: probabilities of double
      return n.wide ? launch<T>(e, words, Uniform4(), Bernoulli<T, double>{n.a}) : launch<T>(e, words, Uniform4(), Bernoulli<T, float>{n.a});
    case Kind::whole:
      return n.wide ? launch<T>(e, words, Words2(), Whole<T, uint64_t>()) : launch<T>(e, words, Words4(), Whole<T, uint32_t>());
    case Kind::whole_from:
      return n.wide ? launch<T>(e, words, Words2(), WholeFrom<T, uint64_t>{n.range, n.from})
                    : launch<T>(e, words, Words4(), WholeFrom<T, uint32_t>{n.range, n.from});
    default: return false;
  }
}

}  // namespace

bool have_kernels() { return true; }

Device current_device() {
  int device = 0, multiprocessors = 0, threads = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device);
  return {multiprocessors, threads};
}

bool draw(const Elements& elements, const Words& words, const Numbers& numbers) {
  switch (elements.dtype) {
    case at::kFloat: if (draw_floating<float, float, Uniform4, Normal4>(elements, words, numbers)) return true; break;
    case at::kDouble: if (draw_floating<double, double, Uniform2, Normal2>(elements, words, numbers)) return true; break;
    case at::kHalf: if (draw_floating<at::Half, float, Uniform4, Normal4>(elements, words, numbers)) return true; break;
    case at::kBFloat16: if (draw_floating<at::BFloat16, float, Uniform4, Normal4>(elements, words, numbers)) return true; break;
    default: break;
  }
  return AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, elements.dtype, "draw",
                                    [&] { return draw_any<scalar_t>(elements, words, numbers); });
}

}  // namespace dtensor::rng::cuda
