// The kernel of token_statistics.cpp, which includes this once for each instruction set, in a namespace of its own. T: float or double.

#include <dtensor/base/vectors/exponential.inl>

// Calls f(first, sixteen) for the elements of a row divided by the temperature. Behind the last ones there are logits of -infinity.
template <class T, class F>
DTENSOR_INLINE void for_sixteens(const T* row, int64_t size, T temperature, const F& f) {
  const auto scaled = [&](const T* from) DTENSOR_INLINE_LAMBDA {
    auto x = load<T>(from);
    for (auto& part : x.part) part /= temperature;
    return x;
  };
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) f(i, scaled(row + i));
  if (i == size) return;
  T last[16];
  std::fill(last, last + 16, -std::numeric_limits<T>::infinity());
  std::copy_n(row + i, size - i, last);
  f(i, scaled(last));
}

// x -= by, and no less than kImpossible, so that 0 times it is 0.
template <class T>
DTENSOR_INLINE void lower(Sixteen<T>& x, T by) {
  for (auto& part : x.part) {
    part -= by;
    part = part < T(kImpossible) ? T(kImpossible) - typename Sixteen<T>::Part{} : part;
  }
}

template <class T>
DTENSOR_INLINE T sum_of(const Sixteen<T>& x) {
  alignas(64) T lanes[16];
  store(lanes, x);
  T sum = 0;
  for (const T lane : lanes) sum += lane;
  return sum;
}

template <class T>
DTENSOR_INLINE T largest_of(const T* row, int64_t size, T temperature) {
  auto most = all(-std::numeric_limits<T>::infinity());
  for_sixteens(row, size, temperature, [&](int64_t, const Sixteen<T>& x) DTENSOR_INLINE_LAMBDA {
    for (int i = 0; i < Sixteen<T>::kParts; ++i) most.part[i] = x.part[i] > most.part[i] ? x.part[i] : most.part[i];
  });
  alignas(64) T lanes[16];
  store(lanes, most);
  return *std::max_element(lanes, lanes + 16);
}

template <class T>
void sum_rows(const LogitRows<T>& in, int64_t begin, int64_t end, T* sums) {
  for (auto row = begin; row < end; ++row) {
    const T* const logits = in.row(row);
    const T largest = largest_of(logits, in.size, in.temperature);
    auto total = all(T(0)), weighted = all(T(0)), squares = all(T(0));
    for_sixteens(logits, in.size, in.temperature, [&](int64_t, Sixteen<T> x) DTENSOR_INLINE_LAMBDA {
      lower(x, largest);
      auto e = x;
      exp_in_place(e);
      for (int i = 0; i < Sixteen<T>::kParts; ++i) {
        total.part[i] += e.part[i];
        weighted.part[i] += e.part[i] * x.part[i];
        squares.part[i] += e.part[i] * e.part[i];
      }
    });
    const auto chosen = in.chosen(row);
    const T each[5] = {largest, sum_of(total), sum_of(weighted), sum_of(squares), chosen < 0 ? 0 : logits[chosen] / in.temperature};
    for (int i = 0; i < 5; ++i) sums[i * in.rows() + row] = each[i];
  }
}

// d logp = [chosen] - p, d entropy = -p (log p + entropy), d sum_squares = 2 p (p - sum_squares)
template <class T>
void write_gradients(const LogitRows<T>& in, const RowFactors<T>& of, int64_t begin, int64_t end, T* gradient) {
  for (auto row = begin; row < end; ++row) {
    const T logp = of.logp[row], entropy = of.entropy[row], squares = 2 * of.squares[row];
    const T own_entropy = of.entropies[row], own_squares = of.sums_of_squares[row];
    T* const to = gradient + row * in.size;
    for_sixteens(in.row(row), in.size, in.temperature, [&](int64_t first, Sixteen<T> x) DTENSOR_INLINE_LAMBDA {
      lower(x, of.lse[row]);
      auto p = x;
      exp_in_place(p);
      for (int i = 0; i < Sixteen<T>::kParts; ++i) {
        const auto factor = squares * (p.part[i] - own_squares) - entropy * (x.part[i] + own_entropy) - logp;
        x.part[i] = factor * p.part[i] / in.temperature;
      }
      if (first + 16 <= in.size) return store(to + first, x);
      alignas(64) T last[16];
      store(last, x);
      std::copy_n(last, in.size - first, to + first);
    });
    if (const auto chosen = in.chosen(row); chosen >= 0) to[chosen] += logp / in.temperature;
  }
}
