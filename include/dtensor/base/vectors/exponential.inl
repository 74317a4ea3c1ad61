// The exponential of sixteen elements, for kernels as sixteen.inl says. These include exp_series.hpp before.

#include <dtensor/base/vectors/sixteen.inl>

// exp(x) for x <= 0, and 0 below the smallest normal number: 2^n times the series of the rest. Of x > 0 it is any number, and of NaN it is
// NaN.
template <class T>
DTENSOR_INLINE void exp_in_place(Sixteen<T>& x) {
  using S = ExpSeries<T>;
  typedef typename S::Bits Whole __attribute__((vector_size(DTENSOR_VECTOR_BYTES)));
  for (auto& part : x.part) {
    const auto low = part < S::kLowest;
    const auto at = low ? S::kLowest - typename Sixteen<T>::Part{} : part;
    const auto shifted = at * S::kLog2e + S::kRound;
    const auto n = shifted - S::kRound;
    const auto rest = (at - n * S::kLn2High) - n * S::kLn2Low;
    auto sum = S::kTerms[0] - typename Sixteen<T>::Part{};
    for (int i = 1; i < S::kCount; ++i) sum = sum * rest + S::kTerms[i];
    const auto exponent = (__builtin_bit_cast(Whole, shifted) << S::kMantissa) + S::kOne;
    part = low ? typename Sixteen<T>::Part{} : sum * __builtin_bit_cast(typename Sixteen<T>::Part, exponent);
  }
}
