// Vectors of 16 elements, in registers of DTENSOR_VECTOR_BYTES. Kernels include this once for each instruction set, in a namespace of its own.

template <class T>
struct Sixteen {
  static constexpr int kParts = 16 * sizeof(T) / DTENSOR_VECTOR_BYTES, kLanes = 16 / kParts;
  typedef T Part __attribute__((vector_size(DTENSOR_VECTOR_BYTES)));
  typedef T Loose __attribute__((vector_size(DTENSOR_VECTOR_BYTES), aligned(sizeof(T)), may_alias));
  Part part[kParts];
};

template <class T>
DTENSOR_INLINE Sixteen<T> all(T x) {
  Sixteen<T> y;
  for (auto& part : y.part) part = x - typename Sixteen<T>::Part{};
  return y;
}

template <class T>
DTENSOR_INLINE Sixteen<T> load(const T* from) {
  Sixteen<T> y;
  for (int i = 0; i < Sixteen<T>::kParts; ++i) y.part[i] = *reinterpret_cast<const typename Sixteen<T>::Loose*>(from + i * Sixteen<T>::kLanes);
  return y;
}

// bfloat16 is the upper half of a float.
template <class T>
DTENSOR_INLINE Sixteen<T> load(const uint16_t* from) {
  alignas(64) uint32_t wide[16];
  for (int i = 0; i < 16; ++i) wide[i] = static_cast<uint32_t>(from[i]) << 16;
  return load<float>(reinterpret_cast<const float*>(wide));
}

template <class T>
DTENSOR_INLINE void store(T* to, const Sixteen<T>& x) {
  for (int i = 0; i < Sixteen<T>::kParts; ++i) *reinterpret_cast<typename Sixteen<T>::Loose*>(to + i * Sixteen<T>::kLanes) = x.part[i];
}

// sum + a * b
template <class T>
DTENSOR_INLINE void add_product(Sixteen<T>& sum, const Sixteen<T>& a, T b) {
  for (int i = 0; i < Sixteen<T>::kParts; ++i) sum.part[i] += a.part[i] * b;
}

template <class T>
DTENSOR_INLINE Sixteen<T> plus(Sixteen<T> a, const Sixteen<T>& b) {
  for (int i = 0; i < Sixteen<T>::kParts; ++i) a.part[i] += b.part[i];
  return a;
}
