// The numbers that libtorch's kernels give to an element of the whole tensor, computed element by element. Compiled with libtorch's flags
// and headers, because its transformations of random words differ between versions. Also compiled for the host, where tests compare the
// numbers with what GPUs have printed.
#pragma once

#include "rng/cuda/kernels.hpp"

#include <dtensor/base/compat.hpp>

#include <ATen/Dispatch.h>
#include <ATen/core/TransformationHelper.h>

#define QUALIFIERS static __forceinline__ __host__ __device__  // of cuRAND's functions
#include <curand_kernel.h>

#include <type_traits>

namespace dtensor::rng::cuda {

using State = curandStatePhilox4_32_10_t;
namespace transformation = at::transformation;

// -- What a thread gets of a call of the generator ---------------------------------------------------------------------------

struct Uniform4 {
  DTENSOR_HOST_DEVICE float4 operator()(State* state) const { return curand_uniform4(state); }
};
struct Uniform2 {
  DTENSOR_HOST_DEVICE double2 operator()(State* state) const { return curand_uniform2_double(state); }
};
struct Normal4 {
  DTENSOR_HOST_DEVICE float4 operator()(State* state) const { return curand_normal4(state); }
};
struct Normal2 {
  DTENSOR_HOST_DEVICE double2 operator()(State* state) const { return curand_normal2_double(state); }
};
struct Words4 {
  DTENSOR_HOST_DEVICE uint4 operator()(State* state) const { return curand4(state); }
};
struct Words2 {
  DTENSOR_HOST_DEVICE ulonglong2 operator()(State* state) const {
    const uint4 words = curand4(state);
    return {static_cast<uint64_t>(words.x) << 32 | words.y, static_cast<uint64_t>(words.z) << 32 | words.w};
  }
};

template <class Four>
DTENSOR_HOST_DEVICE auto component(const Four& numbers, int index) {
  if constexpr (requires { numbers.w; }) {
    return index == 0 ? numbers.x : index == 1 ? numbers.y : index == 2 ? numbers.z : numbers.w;
  } else {
    return index == 0 ? numbers.x : numbers.y;
  }
}

// The number of an element of the whole.
template <class Call, class Transform>
DTENSOR_HOST_DEVICE auto number(int64_t element, const Words& words, Call call, Transform transform) {
  const Place place = place_of(element, words.launch);
  State state;
  curand_init(words.seed, place.subsequence, words.offset + 4 * place.call, &state);
  return transform(component(call(&state), place.component));
}

// -- Its transformations -----------------------------------------------------------------------------------------------------

// From (0, 1] to [from, to).
template <class T, class C>
struct Uniform {
  T from, to;
  C range;
  Uniform(double a, double b) : from(static_cast<T>(a)), to(static_cast<T>(b)), range(static_cast<C>(to - from)) {}
  DTENSOR_HOST_DEVICE T operator()(C number) const {
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
  DTENSOR_HOST_DEVICE C number(C z) const { return transformation::normal<C>(z, mean, std); }
  DTENSOR_HOST_DEVICE T operator()(C z) const { return static_cast<T>(number(z)); }
};
template <class T, class C>
struct LogNormal : Normal<T, C> {
  DTENSOR_HOST_DEVICE T operator()(C z) const { return static_cast<T>(transformation::log_normal<C>(this->number(z))); }
};
template <class T, class C>
struct Exponential {
  C lambda;
  DTENSOR_HOST_DEVICE T operator()(C number) const { return static_cast<T>(transformation::exponential<C>(number, lambda)); }
};
template <class T, class C>
struct Cauchy {
  C median, sigma;
  DTENSOR_HOST_DEVICE T operator()(C number) const { return static_cast<T>(transformation::cauchy<C>(number, median, sigma)); }
};
template <class T, class C>
struct Geometric {
  double p;
  DTENSOR_HOST_DEVICE T operator()(C number) const { return static_cast<T>(transformation::geometric<C>(number, p)); }
};
template <class T, class C>
struct Bernoulli {
  double p;
  DTENSOR_HOST_DEVICE T operator()(C number) const { return static_cast<T>(transformation::bernoulli<C>(number, p)); }
};
template <class T, class Word>
struct WholeFrom {
  uint64_t range;
  int64_t from;
  DTENSOR_HOST_DEVICE T operator()(Word word) const { return transformation::uniform_int_from_to<T>(word, range, from); }
};
template <class T, class Word>
struct Whole {
  DTENSOR_HOST_DEVICE T operator()(Word word) const { return transformation::uniform_int<T>(word); }
};

// -- By operator and dtype ---------------------------------------------------------------------------------------------------

// T: what is written, C: the type that it is computed in. `visit` as below.
template <class T, class C, class UniformCall, class NormalCall, class Visit>
bool with_floating_numbers(const Numbers& n, const Visit& visit) {
  const auto a = static_cast<C>(n.a), b = static_cast<C>(n.b);
  switch (n.kind) {
    case Kind::uniform: return visit(T(), UniformCall(), Uniform<T, C>(n.a, n.b)), true;
    case Kind::normal: return visit(T(), NormalCall(), Normal<T, C>{a, b}), true;
    case Kind::log_normal: return visit(T(), NormalCall(), LogNormal<T, C>{{a, b}}), true;
    case Kind::exponential: return visit(T(), UniformCall(), Exponential<T, C>{a}), true;
    case Kind::cauchy: return visit(T(), UniformCall(), Cauchy<T, C>{a, b}), true;
    default: return false;
  }
}

template <class T, class Visit>
bool with_any_numbers(const Numbers& n, const Visit& visit) {
  using C = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using UniformCall = std::conditional_t<std::is_same_v<T, double>, Uniform2, Uniform4>;
  switch (n.kind) {
    case Kind::geometric: return visit(T(), UniformCall(), Geometric<T, C>{n.a}), true;
    case Kind::bernoulli: return visit(T(), UniformCall(), Bernoulli<T, C>{n.a}), true;
    case Kind::dropout:  // draws floats, whatever is dropped; wide: probabilities of double
      n.wide ? visit(T(), Uniform4(), Bernoulli<T, double>{n.a}) : visit(T(), Uniform4(), Bernoulli<T, float>{n.a});
      return true;
    case Kind::whole: n.wide ? visit(T(), Words2(), Whole<T, uint64_t>()) : visit(T(), Words4(), Whole<T, uint32_t>()); return true;
    case Kind::whole_from:
      n.wide ? visit(T(), Words2(), WholeFrom<T, uint64_t>{n.range, n.from})
             : visit(T(), Words4(), WholeFrom<T, uint32_t>{n.range, n.from});
      return true;
    default: return false;
  }
}

// Calls visit(T(), call, transform), which number() takes. False when the operator does not draw this dtype.
template <class Visit>
bool with_numbers(at::ScalarType dtype, const Numbers& n, const Visit& visit) {
  switch (dtype) {
    case at::kFloat: if (with_floating_numbers<float, float, Uniform4, Normal4>(n, visit)) return true; break;
    case at::kDouble: if (with_floating_numbers<double, double, Uniform2, Normal2>(n, visit)) return true; break;
    case at::kHalf: if (with_floating_numbers<at::Half, float, Uniform4, Normal4>(n, visit)) return true; break;
    case at::kBFloat16: if (with_floating_numbers<at::BFloat16, float, Uniform4, Normal4>(n, visit)) return true; break;
    default: break;
  }
  return AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, dtype, "draw",
                                    [&] { return with_any_numbers<scalar_t>(n, visit); });
}

}  // namespace dtensor::rng::cuda
