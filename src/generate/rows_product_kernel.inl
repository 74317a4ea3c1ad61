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
    for (int n = 0; n < N; ++n) y[m * y_stride + n] = total(sums[m][n]);
  }
}

template <class S, class T>
void multiply(const S* x, int64_t rows, const S* w, int64_t outputs, int64_t k, T* y, int64_t y_stride) {
  constexpr int kM = DTENSOR_VECTOR_BYTES == 64 ? 4 : 2, kN = DTENSOR_VECTOR_BYTES == 64 ? 4 : 2;
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
