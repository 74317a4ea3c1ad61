// The kernel of rows_product.cpp, which includes this once for each instruction set, in a namespace of its own.

#include <dtensor/base/vectors/sixteen.inl>

// A vector's elements, halves on halves.
template <class T>
DTENSOR_INLINE T total(const Sixteen<T>& x) {
  alignas(64) T lanes[16];
  store(lanes, x);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Of each run of 2 Half elements of a and b, its two halves added.
template <int Half, int... Low, class Part>
DTENSOR_INLINE Part add_halves(const Part& a, const Part& b) {
  return __builtin_shufflevector(a, b, Low...) + __builtin_shufflevector(a, b, (Low + Half)...);
}

// The totals of eight vectors of one register each, by the same sums as total(): each step adds the halves of what is left of all of them.
template <class T>
DTENSOR_INLINE void totals_of_eight(const Sixteen<T>* x, T* y) {
  typename Sixteen<T>::Part eights[4], fours[2];
  for (int i = 0; i < 4; ++i)
    eights[i] = add_halves<8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(x[2 * i].part[0], x[2 * i + 1].part[0]);
  for (int i = 0; i < 2; ++i)
    fours[i] = add_halves<4, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(eights[2 * i], eights[2 * i + 1]);
  const auto twos = add_halves<2, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29>(fours[0], fours[1]);
  const auto ones = add_halves<1, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(twos, twos);
  std::memcpy(y, &ones, 8 * sizeof(T));
}

template <class T>
DTENSOR_INLINE void add_products(Sixteen<T>& sum, const Sixteen<T>& a, const Sixteen<T>& b) {
  for (int i = 0; i < Sixteen<T>::kParts; ++i) sum.part[i] += a.part[i] * b.part[i];
}

// `count` elements, at most 16, and zeros.
template <class T, class S>
DTENSOR_INLINE Sixteen<T> load_some(const S* from, int64_t count) {
  if (count == 16) return load<T>(from);
  alignas(64) S some[16] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = from[i];
  return load<T>(some);
}

// Adds `count` products of each of M rows of x and N rows of w, at x and w. kFetch: asks for the next rows of w.
template <int M, int N, bool kFetch, class S, class T>
DTENSOR_INLINE void add_step(Sixteen<T>* sums, const S* x, const S* w, int64_t k, int64_t count) {
  Sixteen<T> xs[M];
  for (int m = 0; m < M; ++m) xs[m] = load_some<T>(x + m * k, count);
  for (int n = 0; n < N; ++n) {
    if constexpr (kFetch) __builtin_prefetch(w + (N + n) * k);
    const auto of_w = load_some<T>(w + n * k, count);
    for (int m = 0; m < M; ++m) add_products(sums[m * N + n], xs[m], of_w);
  }
}

// y[m][n] for M rows of x and N rows of w: sums of every sixteenth product, then these.
template <int M, int N, bool kFetch, class S, class T>
DTENSOR_INLINE void tile(const S* x, const S* w, int64_t k, T* y, int64_t y_stride) {
  constexpr int kSums = (M * N + 7) / 8 * 8;
  Sixteen<T> sums[kSums];
  for (auto& sum : sums) sum = all<T>(0);
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) add_step<M, N, kFetch>(sums, x + i, w + i, k, 16);
  if (i < k) add_step<M, N, kFetch>(sums, x + i, w + i, k, k - i);
  T flat[kSums];
  if constexpr (Sixteen<T>::kParts == 1) {
    for (int s = 0; s < kSums; s += 8) totals_of_eight(sums + s, flat + s);
  } else {
    for (int s = 0; s < M * N; ++s) flat[s] = total(sums[s]);
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) y[m * y_stride + n] = flat[m * N + n];
  }
}

// How many sums fit into registers beside what they are made of, and how many rows a tile has: up to six of x, where it can.
template <class T>
struct Tiles {
  static constexpr int kSums = (DTENSOR_VECTOR_BYTES == 64 ? 24 : 12) / Sixteen<T>::kParts;
  static constexpr int kRows = kSums >= 6 ? 6 : kSums >= 3 ? 3 : 1;
  static constexpr int outputs(int rows) { return kSums / (rows > 3 ? 6 : kRows >= 3 ? 3 : 1); }
};

// M rows of x and `outputs` rows of w. The processor's own prefetching is the best one as long as little is computed for each row of w.
template <int M, bool kFirst, class S, class T>
DTENSOR_INLINE void tiles(const S* x, const S* w, int64_t outputs, int64_t k, T* y, int64_t y_stride) {
  constexpr int kN = Tiles<T>::outputs(M);
  int64_t n = 0;
  for (; n + kN <= outputs; n += kN) tile<M, kN, kFirst && M >= 4>(x, w + n * k, k, y + n, y_stride);
  for (; n < outputs; ++n) tile<M, 1, false>(x, w + n * k, k, y + n, y_stride);
}

// As many of the rows as a tile takes, with `outputs` rows of w. Returns their number.
template <bool kFirst, class S, class T>
DTENSOR_INLINE int64_t some_rows(const S* x, int64_t rows, const S* w, int64_t outputs, int64_t k, T* y, int64_t y_stride) {
  if constexpr (Tiles<T>::kRows >= 6) {
    if (rows >= 6) return tiles<6, kFirst>(x, w, outputs, k, y, y_stride), 6;
    if (rows >= 4) return tiles<4, kFirst>(x, w, outputs, k, y, y_stride), 4;
  }
  if constexpr (Tiles<T>::kRows >= 3) {
    if (rows >= 3) return tiles<3, kFirst>(x, w, outputs, k, y, y_stride), 3;
    if (rows >= 2) return tiles<2, kFirst>(x, w, outputs, k, y, y_stride), 2;
  }
  return tiles<1, kFirst>(x, w, outputs, k, y, y_stride), 1;
}

template <class S, class T>
void multiply(const S* x, int64_t rows, const S* w, int64_t outputs, int64_t k, T* y, int64_t y_stride) {
  constexpr int kStep = Tiles<T>::outputs(1);
  for (int64_t n = 0; n < outputs; n += kStep) {
    const auto count = std::min<int64_t>(kStep, outputs - n);
    for (int64_t m = 0; m < rows;) {
      auto* const to = y + m * y_stride + n;
      m += m == 0 ? some_rows<true>(x, rows, w + n * k, count, k, to, y_stride)
                  : some_rows<false>(x + m * k, rows - m, w + n * k, count, k, to, y_stride);
    }
  }
}
