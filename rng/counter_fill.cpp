// Many blocks at once, in loops that compilers vectorize. Compiled without contraction (meson.build), see elementary.hpp.
#pragma GCC optimize("O3")

#include "rng/counter_dispatch.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dtensor::rng {

namespace {

constexpr int kBatch = 128;

template <class Numbers>
struct Batch {
  static constexpr int kElements = kElementsOfBlock<Numbers>;

  uint32_t low[kBatch], high[kBatch];  // of block numbers
  uint32_t word[4][kBatch];
  typename Numbers::Number number[kElements][kBatch];

  DTENSOR_HOST_DEVICE typename Numbers::Word word_at(int k, int i) const {
    if constexpr (sizeof(typename Numbers::Word) == 4) {
      return word[k][i];
    } else {
      return static_cast<uint64_t>(word[2 * k + 1][i]) << 32 | word[2 * k][i];
    }
  }

  DTENSOR_HOST_DEVICE void compute_words(const CounterDraw& draw) {
    for (int i = 0; i < kBatch; ++i) {
      const auto block = philox4x32_10(draw.seed, low[i] | static_cast<uint64_t>(high[i]) << 32, draw.number);
      for (int k = 0; k < 4; ++k) word[k][i] = block.word[k];
    }
  }

  DTENSOR_HOST_DEVICE void compute_numbers(const Numbers& numbers) {
    if constexpr (requires { numbers.element(0); }) {
      for (int k = 0; k < kElements; ++k) {
        for (int i = 0; i < kBatch; ++i) number[k][i] = numbers.element(word_at(k, i));
      }
    } else {
      for (int k = 0; k < kElements; k += 2) {
        for (int i = 0; i < kBatch; ++i) {
          const auto pair = numbers.pair(word_at(k, i), word_at(k + 1, i));
          number[k][i] = pair.first;
          number[k + 1][i] = pair.second;
        }
      }
    }
  }
};

template <class Numbers>
void compute(Batch<Numbers>& batch, const CounterDraw& draw, const Numbers& numbers) {
  batch.compute_words(draw);
  batch.compute_numbers(numbers);
}

#if defined(__x86_64__)

#define DTENSOR_AVX2 __attribute__((target("avx2")))

DTENSOR_AVX2 inline __m256i all(uint64_t value) { return _mm256_set1_epi64x(static_cast<int64_t>(value)); }
DTENSOR_AVX2 inline __m256i load(const uint32_t* from) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
DTENSOR_AVX2 inline void store(uint32_t* to, __m256i lanes) {
  const auto halves = _mm256_permutevar8x32_epi32(lanes, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(halves));
}

// philox4x32_10 of four blocks at once, each in the lower halves of lanes of 64 bits, where the multiplication is. (Compilers keep words of
// 32 bits together, and shuffle.)
template <class Numbers>
DTENSOR_AVX2 void compute_words_avx2(Batch<Numbers>& batch, const CounterDraw& draw) {
  for (int i = 0; i < kBatch; i += 4) {
    auto c0 = load(batch.low + i), c1 = load(batch.high + i), c2 = all(static_cast<uint32_t>(draw.number)), c3 = all(draw.number >> 32);
    auto k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const auto a = _mm256_mul_epu32(c0, all(0xD2511F53u)), b = _mm256_mul_epu32(c2, all(0xCD9E8D57u));
      c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), c1), all(k0));
      c1 = b;  // the upper halves are never looked at
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), c3), all(k1));
      c3 = a;
    }
    store(batch.word[0] + i, c0), store(batch.word[1] + i, c1), store(batch.word[2] + i, c2), store(batch.word[3] + i, c3);
  }
}

template <class Numbers>
DTENSOR_AVX2 void compute_avx2(Batch<Numbers>& batch, const CounterDraw& draw, const Numbers& numbers) {
  compute_words_avx2(batch, draw);
  batch.compute_numbers(numbers);
}

template <class Numbers>
auto best_compute() {
  return __builtin_cpu_supports("avx2") ? &compute_avx2<Numbers> : &compute<Numbers>;
}
#else
template <class Numbers>
auto best_compute() {
  return &compute<Numbers>;
}
#endif

// Gathers blocks until a batch is full, computes it, and writes what belongs to the runs.
template <class T, class Numbers>
class Writer {
 public:
  Writer(T* to, const CounterDraw& draw, const Numbers& numbers) : to_(to), draw_(draw), numbers_(numbers) {}

  void add(const Interval& run) {
    for (int64_t begin = run.begin; begin < run.end;) {
      const int64_t block = begin / kElements, end = std::min(run.end, (block + 1) * kElements);
      batch_.low[count_] = static_cast<uint32_t>(block);
      batch_.high[count_] = static_cast<uint32_t>(block >> 32);
      first_[count_] = static_cast<uint8_t>(begin - block * kElements);
      last_[count_] = static_cast<uint8_t>(end - block * kElements);
      all_ &= end - begin == kElements;
      if (++count_ == kBatch) flush();
      begin = end;
    }
  }

  void flush() {
    for (int i = count_; i < kBatch; ++i) batch_.low[i] = batch_.high[i] = 0;
    compute_(batch_, draw_, numbers_);
    if (all_ && count_ == kBatch) {
      for (int i = 0; i < kBatch; ++i) {
        for (int k = 0; k < kElements; ++k) to_[i * kElements + k] = static_cast<T>(batch_.number[k][i]);
      }
      to_ += kBatch * kElements;
    } else {
      for (int i = 0; i < count_; ++i) {
        for (int k = first_[i]; k < last_[i]; ++k) *to_++ = static_cast<T>(batch_.number[k][i]);
      }
    }
    count_ = 0;
    all_ = true;
  }

 private:
  static constexpr int kElements = Batch<Numbers>::kElements;

  T* to_;
  const CounterDraw draw_;
  const Numbers numbers_;
  decltype(best_compute<Numbers>()) compute_ = best_compute<Numbers>();
  Batch<Numbers> batch_;
  uint8_t first_[kBatch], last_[kBatch];  // of the elements of a block, those that are written
  int count_ = 0;
  bool all_ = true;  // are
};

template <class T, class Numbers>
void write(const at::Tensor& to, const Runs& runs, const CounterDraw& draw, const Numbers& numbers) {
  Writer<T, Numbers> writer(to.data_ptr<T>(), draw, numbers);
  runs([&](const Interval& run) { writer.add(run); });
  writer.flush();
}

}  // namespace

bool fill(const at::Tensor& to, const Runs& runs, const CounterDraw& draw, const CounterNumbers& numbers) {
  return with_numbers(to.scalar_type(), numbers, [&]<class T>(T, const auto& of_type) { write<T>(to, runs, draw, of_type); });
}

}  // namespace dtensor::rng
