#include <dtensor/parallel/context/short_attention.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <cstring>

// Compiled twice where processors may have wide registers: for those that all have, and for theirs.
#if defined(__x86_64__)
#define DTENSOR_WIDE __attribute__((target("avx2,fma")))
#endif
#define DTENSOR_INLINE inline __attribute__((always_inline))

namespace dtensor::context::detail {

namespace {

// Of a tensor [batch, heads, rows, dim] or [batch, heads, rows], one row of the batch.
template <class T>
struct HeadRows {
  T* data;
  int64_t head, row;  // strides

  HeadRows(const at::Tensor& x, int64_t batch)
      : data(x.data_ptr<T>() + batch * x.stride(0)), head(x.stride(1)), row(x.stride(2)) {
    TORCH_INTERNAL_ASSERT(x.dim() == 3 || x.stride(3) == 1 || x.size(3) == 1);
  }
  DTENSOR_INLINE T* at(int64_t h, int64_t r) const { return data + h * head + r * row; }
};

// Eight or four numbers, of a wide register where there is one.
template <class T>
struct Lanes {
  static constexpr int64_t kCount = 32 / sizeof(T);
  typedef T Vector __attribute__((vector_size(32)));

  static DTENSOR_INLINE void load(Vector& lanes, const T* from) { std::memcpy(&lanes, from, sizeof lanes); }
  static DTENSOR_INLINE void store(T* to, const Vector& lanes) { std::memcpy(to, &lanes, sizeof lanes); }
  static DTENSOR_INLINE T sum(const Vector& lanes) {  // in pairs, which processors add side by side
    if constexpr (kCount == 4) {
      const auto pair = __builtin_shufflevector(lanes, lanes, 0, 1) + __builtin_shufflevector(lanes, lanes, 2, 3);
      return pair[0] + pair[1];
    } else {
      const auto four = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) + __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7);
      return (four[0] + four[2]) + (four[1] + four[3]);
    }
  }
};

template <class T>
DTENSOR_INLINE T dot(const T* a, const T* b, int64_t size) {
  using L = Lanes<T>;
  typename L::Vector sums{}, x, y;
  int64_t i = 0;
  for (; i + L::kCount <= size; i += L::kCount) {
    L::load(x, a + i), L::load(y, b + i);
    sums += x * y;
  }
  auto sum = L::sum(sums);
  for (; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// to += factor * x
template <class T>
DTENSOR_INLINE void add_scaled(T* to, T factor, const T* x, int64_t size) {
  using L = Lanes<T>;
  typename L::Vector sums, more;
  int64_t i = 0;
  for (; i + L::kCount <= size; i += L::kCount) {
    L::load(sums, to + i), L::load(more, x + i);
    L::store(to + i, sums + factor * more);
  }
  for (; i < size; ++i) to[i] += factor * x[i];
}

// What a backward pass reads beside queries, keys and values, and what it adds to.
template <class T>
struct Gradients {
  HeadRows<T> grad, delta, dq, dk, dv;
};

// One row of the batch. Numbers of pairs lie in the order of queries, of the keys that each sees, and of heads.
template <class T>
struct Block {
  const BlockMask& mask;
  int64_t key_heads, group, dim;  // `group` heads share a key head
  T scale;
  HeadRows<T> q, k, v;

  int64_t heads() const { return key_heads * group; }

  // Scores less the largest of their query, which `largest` gets; 0 where a query sees no key.
  DTENSOR_INLINE void write_scores(T* pairs, const HeadRows<T>& largest) const {
    for (int64_t i = 0; i < mask.queries(); ++i) {
      auto* const first = pairs;
      for (const auto& run : mask.seen_by(i)) {
        for (auto j = run.begin; j < run.end; ++j) pairs = write_pair(pairs, i, j);
      }
      for (int64_t h = 0; h < heads(); ++h) {
        T most = first == pairs ? 0 : first[h];
        for (auto* pair = first + h; pair < pairs; pair += heads()) most = std::max(most, *pair);
        for (auto* pair = first + h; pair < pairs; pair += heads()) *pair -= most;
        *largest.at(h, i) = most;
      }
    }
  }

  // Scores less `lse`.
  DTENSOR_INLINE void write_scores_after(T* pairs, const HeadRows<T>& lse) const {
    for (int64_t i = 0; i < mask.queries(); ++i) {
      for (const auto& run : mask.seen_by(i)) {
        for (auto j = run.begin; j < run.end; ++j) {
          auto* const pair = pairs;
          pairs = write_pair(pairs, i, j);
          for (int64_t h = 0; h < heads(); ++h) pair[h] -= *lse.at(h, i);
        }
      }
    }
  }

  // `pairs`: exponentials of what write_scores() wrote. `lse` has the largest scores.
  DTENSOR_INLINE void attend(const T* pairs, const HeadRows<T>& out, const HeadRows<T>& lse) const {
    for (int64_t i = 0; i < mask.queries(); ++i) {
      int64_t seen = 0;
      for (const auto& run : mask.seen_by(i)) seen += run.length();
      for (int64_t h = 0; h < heads(); ++h) {
        T sum = 0;
        for (int64_t n = 0; n < seen; ++n) sum += pairs[n * heads() + h];
        *lse.at(h, i) = seen ? *lse.at(h, i) + std::log(sum) : static_cast<T>(kNothing);
        for (int64_t d = 0; d < dim; ++d) out.at(h, i)[d] = 0;
        add_values(out.at(h, i), pairs + h, 1 / sum, i, h);
      }
      pairs += seen * heads();
    }
  }

  // `pairs`: weights. The gradient of a score is weight (grad . value - delta).
  DTENSOR_INLINE void add_gradients(const T* pairs, const Gradients<T>& of) const {
    constexpr auto kLanes = Lanes<T>::kCount;
    const auto vectors = dim % kLanes == 0 ? dim / kLanes : 0;
    for (int64_t i = 0; i < mask.queries(); ++i) {
      const auto* const first = pairs;
      for (const auto& run : mask.seen_by(i)) pairs += run.length() * heads();
      for (int64_t h = 0; h < heads(); ++h) {
        if (vectors == 2) add_query_gradients<2>(first + h, i, h, of);
        else if (vectors == 4) add_query_gradients<4>(first + h, i, h, of);
        else add_query_gradients(first + h, i, h, of);
      }
    }
  }

 private:
  DTENSOR_INLINE T* write_pair(T* pair, int64_t i, int64_t j) const {
    for (int64_t of = 0, h = 0; of < key_heads; ++of) {
      for (int64_t member = 0; member < group; ++member, ++h) *pair++ = dot(q.at(h, i), k.at(of, j), dim) * scale;
    }
    return pair;
  }

  DTENSOR_INLINE void add_query_gradients(const T* pair, int64_t i, int64_t h, const Gradients<T>& of) const {
    const auto key_head = h / group;
    for (const auto& run : mask.seen_by(i)) {
      for (auto j = run.begin; j < run.end; ++j, pair += heads()) {
        const auto d = *pair * (dot(of.grad.at(h, i), v.at(key_head, j), dim) - *of.delta.at(h, i)) * scale;
        add_scaled(of.dq.at(h, i), d, k.at(key_head, j), dim);
        add_scaled(of.dk.at(key_head, j), d, q.at(h, i), dim);
        add_scaled(of.dv.at(key_head, j), *pair, of.grad.at(h, i), dim);
      }
    }
  }

  // The same sums with rows of N vectors, where those of the query stay in registers.
  template <int N>
  DTENSOR_INLINE void add_query_gradients(const T* pair, int64_t i, int64_t h, const Gradients<T>& of) const {
    using L = Lanes<T>;
    const auto key_head = h / group;
    typename L::Vector query[N], grad[N], dq[N], x;
    for (int n = 0; n < N; ++n) {
      L::load(query[n], q.at(h, i) + n * L::kCount);
      L::load(grad[n], of.grad.at(h, i) + n * L::kCount);
      L::load(dq[n], of.dq.at(h, i) + n * L::kCount);
    }
    const auto delta = *of.delta.at(h, i);
    for (const auto& run : mask.seen_by(i)) {
      for (auto j = run.begin; j < run.end; ++j, pair += heads()) {
        typename L::Vector sums{};
        for (int n = 0; n < N; ++n) L::load(x, v.at(key_head, j) + n * L::kCount), sums += grad[n] * x;
        const auto d = *pair * (L::sum(sums) - delta) * scale;
        for (int n = 0; n < N; ++n) L::load(x, k.at(key_head, j) + n * L::kCount), dq[n] += d * x;
        auto* const dk = of.dk.at(key_head, j);
        auto* const dv = of.dv.at(key_head, j);
        for (int n = 0; n < N; ++n) L::load(x, dk + n * L::kCount), L::store(dk + n * L::kCount, x + d * query[n]);
        for (int n = 0; n < N; ++n) L::load(x, dv + n * L::kCount), L::store(dv + n * L::kCount, x + *pair * grad[n]);
      }
    }
    for (int n = 0; n < N; ++n) L::store(of.dq.at(h, i) + n * L::kCount, dq[n]);
  }

  DTENSOR_INLINE void add_values(T* to, const T* pair, T factor, int64_t i, int64_t h) const {
    for (const auto& run : mask.seen_by(i)) {
      for (auto j = run.begin; j < run.end; ++j, pair += heads()) add_scaled(to, *pair * factor, v.at(h / group, j), dim);
    }
  }
};

// Calls f in wide registers where there are any. What it calls is to be inlined.
#if defined(DTENSOR_WIDE)
template <class F>
DTENSOR_WIDE void run_wide(const F& f) {
  f();
}
#endif
template <class F>
void run(const F& f) {
#if defined(DTENSOR_WIDE)
  static const bool has_wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_wide) return run_wide(f);
#endif
  f();
}

const BlockMask& mask_of(const AttentionCall& call, int64_t batch) { return call.masks[call.masks.size() == 1 ? 0 : batch]->mask; }

// Calls f(block, numbers for its pairs) for each row of the batch.
template <class T, class F>
void for_each_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call, const F& f) {
  for (int64_t b = 0; b < q.size(0); ++b) {
    const auto& mask = mask_of(call, b);
    const Block<T> block{mask, k.size(1), q.size(1) / k.size(1), q.size(3), static_cast<T>(call.scale), {q, b}, {k, b}, {v, b}};
    f(b, block, at::empty({mask.cells() * block.heads()}, q.options()));
  }
}

template <class T>
void attend(const Attended& to, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  for_each_block<T>(q, k, v, call, [&](int64_t b, const Block<T>& block, const at::Tensor& pairs) {
    auto* const numbers = pairs.data_ptr<T>();
    const HeadRows<T> out(to.out, b), lse(to.lse, b);
    run([&]() __attribute__((always_inline)) { block.write_scores(numbers, lse); });
    pairs.exp_();
    run([&]() __attribute__((always_inline)) { block.attend(numbers, out, lse); });
  });
}

template <class T>
void add_gradients(const BlockGradients& into, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& grad,
                   const at::Tensor& lse, const at::Tensor& delta, const AttentionCall& call) {
  for_each_block<T>(q, k, v, call, [&](int64_t b, const Block<T>& block, const at::Tensor& pairs) {
    auto* const numbers = pairs.data_ptr<T>();
    run([&]() __attribute__((always_inline)) { block.write_scores_after(numbers, {lse, b}); });
    pairs.exp_();
    const Gradients<T> of{{grad, b}, {delta, b}, {into.dq, b}, {into.dk, b}, {into.dv, b}};
    run([&]() __attribute__((always_inline)) { block.add_gradients(numbers, of); });
  });
}

}  // namespace

bool suits_short(const at::Tensor& q, const AttentionCall& call) {
  constexpr int64_t kFewest = 128, kMostSeen = 64;  // below, one tile has all queries; from there on, tiles are as fast
  if (!q.is_cpu() || sums_of(q) != q.scalar_type() || call.dropout || q.size(2) < kFewest) return false;
  return std::ranges::all_of(call.masks, [&](const auto* mask) { return !mask->pieces && mask->mask.cells() <= kMostSeen * q.size(2); });
}

Attended short_attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const AttentionCall& call) {
  const auto q = with_dense_rows(q_in), k = with_dense_rows(k_in), v = with_dense_rows(v_in);
  const Attended made{at::empty_like(q), at::empty(q.sizes().slice(0, 3), q.options())};
  q.scalar_type() == at::kDouble ? attend<double>(made, q, k, v, call) : attend<float>(made, q, k, v, call);
  return made;
}

void add_short_gradients(const BlockGradients& into, const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                         const OutputGradient& of, const AttentionCall& call) {
  const auto q = with_dense_rows(q_in), k = with_dense_rows(k_in), v = with_dense_rows(v_in), grad = with_dense_rows(of.grad);
  const auto deltas = of.deltas();
  if (q.scalar_type() == at::kDouble) add_gradients<double>(into, q, k, v, grad, of.lse, deltas, call);
  else add_gradients<float>(into, q, k, v, grad, of.lse, deltas, call);
}

}  // namespace dtensor::context::detail
