// The kernel of rms_norm.cpp, which includes this once for each instruction set, in a namespace of its own. S: of elements; T: of sums.

// The sum of f(i) for i in [0, count), always in one order: sixteen sums side by side, then those.
template <class T, class F>
DTENSOR_INLINE T sum_of(int64_t count, const F& f) {
  constexpr int64_t kLanes = 16;
  T sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += f(i + lane);
  }
  for (; i < count; ++i) sums[i % kLanes] += f(i);
  T sum = 0;
  for (const T each : sums) sum += each;
  return sum;
}

template <class T, class S>
DTENSOR_INLINE T scale_of(const S* x, int64_t dim, double eps) {
  const T squares = sum_of<T>(dim, [&](int64_t i) DTENSOR_INLINE_LAMBDA { return static_cast<T>(x[i]) * static_cast<T>(x[i]); });
  return 1 / std::sqrt(squares / static_cast<T>(dim) + static_cast<T>(eps));
}

template <class S>
void normalize(const S* x, const S* weight, int64_t rows, int64_t dim, double eps, S* y) {
  using T = at::opmath_type<S>;
  for (int64_t row = 0; row < rows; ++row, x += dim, y += dim) {
    const T scale = scale_of<T>(x, dim, eps);
    for (int64_t i = 0; i < dim; ++i) {
      const auto normal = static_cast<S>(static_cast<T>(x[i]) * scale);
      y[i] = static_cast<S>(static_cast<T>(normal) * static_cast<T>(weight[i]));
    }
  }
}

// With n = x * scale and h = gradient * weight: scale * (h - n * mean(h * n)).
template <class S, class T>
void pull_back(const S* gradient, const S* x, const S* weight, int64_t rows, int64_t dim, double eps, T* scales, S* to) {
  for (int64_t row = 0; row < rows; ++row, gradient += dim, x += dim, to += dim) {
    const T scale = scales[row] = scale_of<T>(x, dim, eps);
    const auto h = [&](int64_t i) DTENSOR_INLINE_LAMBDA { return static_cast<T>(gradient[i]) * static_cast<T>(weight[i]); };
    const auto n = [&](int64_t i) DTENSOR_INLINE_LAMBDA { return static_cast<T>(x[i]) * scale; };
    const T mean = sum_of<T>(dim, [&](int64_t i) DTENSOR_INLINE_LAMBDA { return h(i) * n(i); }) / static_cast<T>(dim);
    for (int64_t i = 0; i < dim; ++i) to[i] = static_cast<S>(scale * (h(i) - n(i) * mean));
  }
}

// The weight's gradient adds rows up in float64, a column at a time: in one order, whatever the number of threads.
template <class S, class T>
void add_columns(const S* gradient, const S* x, const T* scales, int64_t rows, int64_t dim, int64_t columns, double* sums) {
  for (int64_t row = 0; row < rows; ++row, gradient += dim, x += dim) {
    for (int64_t i = 0; i < columns; ++i) sums[i] += static_cast<T>(gradient[i]) * (static_cast<T>(x[i]) * scales[row]);
  }
}
