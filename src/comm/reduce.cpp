// Rank-ordered reductions over raw memory.
#include "src/comm/reduce.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_ops.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace dtensor::comm {

namespace {

// Elements that are accumulated at a time: small enough for the first-level cache, a constant so that loops vectorize.
constexpr int64_t kBlock = 1024;

template <class T> struct Accumulator { using type = T; };
template <> struct Accumulator<c10::Half> { using type = float; };
template <> struct Accumulator<c10::BFloat16> { using type = float; };

template <class T> constexpr bool is_complex = false;
template <class T> constexpr bool is_complex<c10::complex<T>> = true;

// NaN wins, as in at::minimum and at::maximum.
template <class T> T smaller(T a, T b) { return b < a || b != b ? b : a; }
template <class T> T larger(T a, T b) { return b > a || b != b ? b : a; }

template <class T, class A, class F>
void accumulate(A* sum, const T* input, int64_t count, F combine) {
  for (int64_t i = 0; i < count; ++i) sum[i] = combine(sum[i], static_cast<A>(input[i]));
}

// The average of one element; `sum`, where some part is not finite.
template <class A, class T>
A average_of_shards(c10::ArrayRef<const void*> inputs, int64_t at, A sum) {
  A average = 0;
  for (const void* input : inputs) {
    const auto part = static_cast<A>(static_cast<const T*>(input)[at]);
    if (!std::isfinite(part)) return sum;
    average += part / static_cast<A>(inputs.size());
  }
  return std::clamp(average, std::numeric_limits<A>::lowest(), std::numeric_limits<A>::max());
}

// Averages a block of sums. The sum of finite numbers may be infinite, of which the average is not.
template <class A, class T>
void divide_by_count(A* sum, c10::ArrayRef<const void*> inputs, int64_t begin, int64_t length) {
  const auto divisor = static_cast<A>(inputs.size());
  for (int64_t i = 0; i < length; ++i) sum[i] = sum[i] / divisor;
  if constexpr (std::is_floating_point_v<A>) {
    bool finite = true;
    for (int64_t i = 0; i < length; ++i) finite &= sum[i] - sum[i] == 0;
    for (int64_t i = 0; !finite && i < length; ++i) {
      if (!std::isfinite(sum[i])) sum[i] = average_of_shards<A, T>(inputs, begin + i, sum[i]);
    }
  }
}

template <class A, class T, class F>
void reduce_blocks(T* out, c10::ArrayRef<const void*> inputs, int64_t count, F combine, bool average) {
  std::array<A, kBlock> sum;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (int64_t i = 0; i < length; ++i) sum[i] = static_cast<A>(first[i]);
    for (const void* input : inputs.slice(1)) {
      const T* block = static_cast<const T*>(input) + begin;
      if (length == kBlock) {
        accumulate(sum.data(), block, kBlock, combine);
      } else {
        accumulate(sum.data(), block, length, combine);
      }
    }
    if (average) divide_by_count<A, T>(sum.data(), inputs, begin, length);
    for (int64_t i = 0; i < length; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
}

template <class T>
void reduce_numbers(ReduceOp op, T* out, c10::ArrayRef<const void*> inputs, int64_t count) {
  using A = typename Accumulator<T>::type;
  using Sum = std::conditional_t<std::is_integral_v<T>, int64_t, A>;  // of an average, which fits into T where the sum does not
  switch (op) {
    case ReduceOp::sum:
      return reduce_blocks<A>(out, inputs, count, [](A a, A b) { return static_cast<A>(a + b); }, false);
    case ReduceOp::avg:
      if constexpr (is_complex<T>) return reduce_numbers(op, reinterpret_cast<typename T::value_type*>(out), inputs, 2 * count);
      else return reduce_blocks<Sum>(out, inputs, count, [](Sum a, Sum b) { return a + b; }, true);
    case ReduceOp::product:
      return reduce_blocks<A>(out, inputs, count, [](A a, A b) { return static_cast<A>(a * b); }, false);
    case ReduceOp::min:
      if constexpr (!is_complex<T>) return reduce_blocks<A>(out, inputs, count, smaller<A>, false);
      break;
    case ReduceOp::max:
      if constexpr (!is_complex<T>) return reduce_blocks<A>(out, inputs, count, larger<A>, false);
      break;
    case ReduceOp::norm2: break;
  }
}

void reduce_bools(ReduceOp op, bool* out, c10::ArrayRef<const void*> inputs, int64_t count) {
  const bool any = op == ReduceOp::sum || op == ReduceOp::max;
  if (any) return reduce_blocks<bool>(out, inputs, count, [](bool a, bool b) { return a || b; }, false);
  reduce_blocks<bool>(out, inputs, count, [](bool a, bool b) { return a && b; }, false);
}

}  // namespace

void reduce(c10::ScalarType dtype, ReduceOp op, void* out, c10::ArrayRef<const void*> inputs, int64_t count) {
  const auto run = [&]<class T>(T*) { reduce_numbers(op, static_cast<T*>(out), inputs, count); };
  switch (dtype) {
    case c10::ScalarType::Float: return run(static_cast<float*>(nullptr));
    case c10::ScalarType::Double: return run(static_cast<double*>(nullptr));
    case c10::ScalarType::Half: return run(static_cast<c10::Half*>(nullptr));
    case c10::ScalarType::BFloat16: return run(static_cast<c10::BFloat16*>(nullptr));
    case c10::ScalarType::Long: return run(static_cast<int64_t*>(nullptr));
    case c10::ScalarType::Int: return run(static_cast<int32_t*>(nullptr));
    case c10::ScalarType::Short: return run(static_cast<int16_t*>(nullptr));
    case c10::ScalarType::Char: return run(static_cast<int8_t*>(nullptr));
    case c10::ScalarType::Byte: return run(static_cast<uint8_t*>(nullptr));
    case c10::ScalarType::ComplexFloat: return run(static_cast<c10::complex<float>*>(nullptr));
    case c10::ScalarType::ComplexDouble: return run(static_cast<c10::complex<double>*>(nullptr));
    case c10::ScalarType::Bool: return reduce_bools(op, static_cast<bool*>(out), inputs, count);
    default: break;
  }
  check_reducible("reduce", dtype, op);
}

void check_reducible(std::string_view tag, c10::ScalarType dtype, ReduceOp op) {
  using S = c10::ScalarType;
  constexpr std::array kNumbers{S::Float, S::Double, S::Half,         S::BFloat16,      S::Long, S::Int,
                                S::Short, S::Char,   S::ComplexFloat, S::ComplexDouble, S::Byte, S::Bool};
  const bool number = std::ranges::find(kNumbers, dtype) != kNumbers.end();
  const bool complex = dtype == S::ComplexFloat || dtype == S::ComplexDouble;
  const bool ordered = op == ReduceOp::min || op == ReduceOp::max;
  const bool meaningful = number && op != ReduceOp::norm2 && !(complex && ordered) && !(dtype == S::Bool && op == ReduceOp::avg);
  require(meaningful, tag, "cannot reduce; got dtype {} with op {}; hint: convert to a number type that has this operation{}",
          c10::toString(dtype), dtensor::name(op), op == ReduceOp::norm2 ? ", and reduce the squares with sum" : "");
}

// Where a call goes straight to the backend's kernel.
static c10::DispatchKeySet kernels_of(const at::Tensor& tensor) { return tensor.key_set() & c10::DispatchKeySet(c10::DispatchKey::CUDA); }

at::Tensor empty(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  return at::Tensor(at::detail::empty_cpu(sizes, dtype));
}

at::Tensor empty_for(const at::Tensor& input, c10::IntArrayRef sizes) {
  if (input.is_meta()) return at::Tensor(at::detail::empty_meta(sizes, input.scalar_type()));
  if (input.is_cpu()) return empty(sizes, input.scalar_type());
  return at::_ops::empty_memory_format::redispatch(kernels_of(input), c10::fromIntArrayRefKnownNonNegative(sizes), input.scalar_type(), {},
                                                   input.device(), {}, {});
}

void copy(const at::Tensor& to, const at::Tensor& from) {
  if (from.is_cpu()) {
    std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes());
  } else {
    auto target = to;
    at::_ops::copy_::redispatch(kernels_of(from), target, from, true);
  }
}

}  // namespace dtensor::comm
