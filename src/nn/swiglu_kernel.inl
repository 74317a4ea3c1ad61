// The kernel of swiglu.cpp, which includes this once for each instruction set, in a namespace of its own. It takes sixteen elements at a time,
// the last ones too, so that an element has the same bits wherever it lies.

#include <dtensor/base/vectors/exponential.inl>

// 1 / (1 + exp(-x)) without an exponential of what is positive.
template <class T>
DTENSOR_INLINE Sixteen<T> logistic(const Sixteen<T>& x) {
  auto power = x;
  for (auto& part : power.part) part = part > 0 ? -part : part;
  exp_in_place(power);
  for (int i = 0; i < Sixteen<T>::kParts; ++i) {
    const auto one = T(1) - typename Sixteen<T>::Part{};
    power.part[i] = (x.part[i] > 0 ? one : power.part[i]) / (one + power.part[i]);
  }
  return power;
}

template <class T>
DTENSOR_INLINE void gate_sixteen(const T* gate, const T* up, T* y) {
  const auto g = load<T>(gate), u = load<T>(up);
  auto s = logistic(g);
  for (int i = 0; i < Sixteen<T>::kParts; ++i) s.part[i] = g.part[i] * s.part[i] * u.part[i];
  store(y, s);
}

// With s = logistic(gate): gradient up s (1 + gate (1 - s)), and gradient gate s.
template <class T>
DTENSOR_INLINE void gate_sixteen_back(const T* gradient, const T* gate, const T* up, T* of_gate, T* of_up) {
  const auto d = load<T>(gradient), g = load<T>(gate), u = load<T>(up);
  const auto s = logistic(g);
  Sixteen<T> to_gate, to_up;
  for (int i = 0; i < Sixteen<T>::kParts; ++i) {
    to_gate.part[i] = d.part[i] * u.part[i] * (s.part[i] * (1 + g.part[i] * (1 - s.part[i])));
    to_up.part[i] = d.part[i] * (g.part[i] * s.part[i]);
  }
  store(of_gate, to_gate), store(of_up, to_up);
}

template <class T>
void gate_all(const T* gate, const T* up, T* y, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) gate_sixteen(gate + i, up + i, y + i);
  if (i == count) return;
  T last[3][16] = {};
  std::copy_n(gate + i, count - i, last[0]), std::copy_n(up + i, count - i, last[1]);
  gate_sixteen(last[0], last[1], last[2]);
  std::copy_n(last[2], count - i, y + i);
}

template <class T>
void gate_all_back(const T* gradient, const T* gate, const T* up, T* of_gate, T* of_up, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) gate_sixteen_back(gradient + i, gate + i, up + i, of_gate + i, of_up + i);
  if (i == count) return;
  T last[5][16] = {};
  std::copy_n(gradient + i, count - i, last[0]), std::copy_n(gate + i, count - i, last[1]), std::copy_n(up + i, count - i, last[2]);
  gate_sixteen_back(last[0], last[1], last[2], last[3], last[4]);
  std::copy_n(last[3], count - i, of_gate + i), std::copy_n(last[4], count - i, of_up + i);
}
