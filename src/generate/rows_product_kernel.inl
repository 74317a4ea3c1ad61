// The kernel of rows_product.cpp, which includes this once for each instruction set, in a namespace of its own.

#include "src/generate/sixteen.inl"

// A vector's elements, halves on halves.
template <class T>
INLINE T total(const Sixteen<T>& x) {
  alignas(64) T lanes[16];
  store(lanes, x);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// The totals of eight vectors of one register each, by the same sums as total(): each step adds the halves of what is left of all of them.
template <class T>
INLINE void totals_of_eight(const Sixteen<T> (&x)[8], T* y) {
  using Part = typename Sixteen<T>::Part;
  typedef int Mask __attribute__((vector_size(64)));
  const auto halves = [](Part a, Part b, Mask low, Mask high) { return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high); };
  const Mask low8{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, high8 = low8 + 8;
  const Mask low4{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, high4 = low4 + 4;
  const Mask low2{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}, high2 = low2 + 2;
  const Mask low1{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, high1 = low1 + 1;
  Part eights[4], fours[2];
  for (int i = 0; i < 4; ++i) eights[i] = halves(x[2 * i].part[0], x[2 * i + 1].part[0], low8, high8);
  for (int i = 0; i < 2; ++i) fours[i] = halves(eights[2 * i], eights[2 * i + 1], low4, high4);
  const auto twos = halves(fours[0], fours[1], low2, high2);
  const auto ones = halves(twos, twos, low1, high1);
  std::memcpy(y, &ones, 8 * sizeof(T));
}

template <class T>
INLINE void add_products(Sixteen<T>& sum, const Sixteen<T>& a, const Sixteen<T>& b) {
  for (int i = 0; i < Sixteen<T>::kParts; ++i) sum.part[i] += a.part[i] * b.part[i];
}

// The last elements of a row, and zeros.
template <class T, class S>
INLINE Sixteen<T> load_some(const S* from, int64_t count) {
  alignas(64) S some[16] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = from[i];
  return load<T>(some);
}

// y[m][n] for M rows of x and N rows of w: sums of every sixteenth product, then these.
template <int M, int N, class S, class T>
INLINE void tile(const S* x, const S* w, int64_t k, T* y, int64_t y_stride) {
  Sixteen<T> sums[M][N];
  for (auto& row : sums) {
    for (auto& sum : row) sum = all<T>(0);
  }
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    Sixteen<T> xs[M];
    for (int m = 0; m < M; ++m) xs[m] = load<T>(x + m * k + i);
    for (int n = 0; n < N; ++n) {
      __builtin_prefetch(w + (N + n) * k + i);  // of the next tile
      const auto of_w = load<T>(w + n * k + i);
      for (int m = 0; m < M; ++m) add_products(sums[m][n], xs[m], of_w);
    }
  }
  if (i < k) {
    Sixteen<T> xs[M];
    for (int m = 0; m < M; ++m) xs[m] = load_some<T>(x + m * k + i, k - i);
    for (int n = 0; n < N; ++n) {
      const auto of_w = load_some<T>(w + n * k + i, k - i);
      for (int m = 0; m < M; ++m) add_products(sums[m][n], xs[m], of_w);
    }
  }
  for (int m = 0; m < M; ++m) {
    if constexpr (N == 8 && Sixteen<T>::kParts == 1) {
      totals_of_eight(sums[m], y + m * y_stride);
    } else {
      for (int n = 0; n < N; ++n) y[m * y_stride + n] = total(sums[m][n]);
    }
  }
}

template <class S, class T>
void multiply(const S* x, int64_t rows, const S* w, int64_t outputs, int64_t k, T* y, int64_t y_stride) {
  constexpr bool kWide = Sixteen<T>::kParts == 1;
  constexpr int kM = kWide ? 3 : DTENSOR_VECTOR_BYTES == 64 ? 4 : 2, kN = kWide ? 8 : DTENSOR_VECTOR_BYTES == 64 ? 4 : 2;
  int64_t n = 0;
  for (; n + kN <= outputs; n += kN) {
    int64_t m = 0;
    for (; m + kM <= rows; m += kM) tile<kM, kN>(x + m * k, w + n * k, k, y + m * y_stride + n, y_stride);
    for (; m < rows; ++m) tile<1, kN>(x + m * k, w + n * k, k, y + m * y_stride + n, y_stride);
  }
  for (; n < outputs; ++n) {
    for (int64_t m = 0; m < rows; ++m) tile<1, 1>(x + m * k, w + n * k, k, y + m * y_stride + n, y_stride);
  }
}
