// The kernel of paged_attention.cpp, which includes this once for each instruction set, in a namespace of its own. DTENSOR_VECTOR_BYTES: of
// a register. A page's keys are transposed, so a vector of 16 elements has the scores of the page's 16 keys.

#include <dtensor/base/vectors/exponential.inl>

// Which keys of a page a row sees: so many of the first, or those of a mask.
struct Seen {
  int count;      // of the page's first keys, up to the last that is seen
  uint32_t mask;  // of the page's keys
};

DTENSOR_INLINE Seen seen_of_page(const Row& row, int64_t page) {
  const auto first = page * kBlockRows;
  const auto before = row.seen - first;  // plainly seen keys of this page and later ones
  if (before >= kBlockRows) return {kBlockRows, 0xffffu};
  uint32_t mask = before > 0 ? (1u << before) - 1 : 0;
  if (row.tree != 0) {
    mask |= static_cast<uint32_t>(before >= 0 ? row.tree << before : before > -64 ? row.tree >> -before : 0) & 0xffffu;
  }
  return {mask == 0 ? 0 : 32 - __builtin_clz(mask), mask};
}

// What a row has seen so far.
template <class T>
struct Running {
  T largest, sum;
  T* values;  // [padded value dim]
};

template <class T>
DTENSOR_INLINE void add_page(Running<T>& to, Sixteen<T> scores, const Seen& seen, const auto* values, int64_t value_dim) {
  alignas(64) T weights[16];
  store(weights, scores);
  T largest = to.largest;
  for (int j = 0; j < seen.count; ++j) {
    if (seen.mask >> j & 1) largest = weights[j] > largest ? weights[j] : largest;
  }
  if (largest > to.largest) {
    alignas(64) T shrink[16] = {to.largest - largest};
    auto shrunk = load<T>(shrink);
    exp_in_place(shrunk);
    store(shrink, shrunk);
    to.sum *= shrink[0];
    for (int64_t d = 0; d < value_dim; d += 16) {
      auto value = load<T>(to.values + d);
      for (auto& part : value.part) part *= shrink[0];
      store(to.values + d, value);
    }
    to.largest = largest;
  }
  for (auto& part : scores.part) part -= largest;
  exp_in_place(scores);
  store(weights, scores);
  T sum = 0;
  for (int j = 0; j < seen.count; ++j) {
    weights[j] = seen.mask >> j & 1 ? weights[j] : 0;
    sum += weights[j];
  }
  to.sum += sum;
  for (int64_t d = 0; d < value_dim; d += 16) {
    auto value = load<T>(to.values + d);
    for (int j = 0; j < seen.count; ++j) add_product(value, load<T>(values + j * value_dim + d), weights[j]);
    store(to.values + d, value);
  }
}

// The scores of a page's keys for Rows rows: sums of every fourth element, added at the end.
template <int Rows, class T>
DTENSOR_INLINE void scores_of_page(const T* const* queries, const auto* keys, int64_t dim, Sixteen<T>* scores) {
  Sixteen<T> sums[Rows][4];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = all<T>(0);
  }
  int64_t d = 0;
  for (; d + 4 <= dim; d += 4) {
    for (int i = 0; i < 4; ++i) {
      const auto key = load<T>(keys + (d + i) * 16);
      for (int r = 0; r < Rows; ++r) add_product(sums[r][i], key, queries[r][d + i]);
    }
  }
  for (; d < dim; ++d) {
    const auto key = load<T>(keys + d * 16);
    for (int r = 0; r < Rows; ++r) add_product(sums[r][0], key, queries[r][d]);
  }
  for (int r = 0; r < Rows; ++r) scores[r] = plus(plus(sums[r][0], sums[r][1]), plus(sums[r][2], sums[r][3]));
}

// Rows of one sequence and one key head.
template <class S, class T>
void attend(const Rows<S, T>& job) {
  constexpr int kTogether = 2;
  const auto& shape = job;
  for (int64_t page = 0; page < job.pages; ++page) {
    const auto block = static_cast<int64_t>(job.table[page]) * shape.key_heads + job.key_head;
    const S* keys = job.keys + block * shape.dim * 16;
    const S* values = job.values + block * 16 * shape.value_dim;
    for (int64_t r = 0; r < job.count; r += kTogether) {
      const T* queries[kTogether];
      Sixteen<T> scores[kTogether];
      const auto together = std::min<int64_t>(kTogether, job.count - r);
      if (job.rows[r].last < page * 16 && job.rows[r + together - 1].last < page * 16) continue;
      for (int i = 0; i < kTogether; ++i) queries[i] = job.queries + std::min(r + i, job.count - 1) * shape.dim;
      if (together == kTogether) {
        scores_of_page<kTogether>(queries, keys, shape.dim, scores);
      } else {
        scores_of_page<1>(queries, keys, shape.dim, scores);
      }
      for (int i = 0; i < together; ++i) {
        const auto seen = seen_of_page(job.rows[r + i], page);
        if (seen.count == 0) continue;
        Running<T> running{job.largest[r + i], job.sums[r + i], job.out + (r + i) * shape.value_dim};
        add_page(running, scores[i], seen, values, shape.value_dim);
        job.largest[r + i] = running.largest;
        job.sums[r + i] = running.sum;
      }
    }
  }
  for (int64_t r = 0; r < job.count; ++r) {
    for (int64_t d = 0; d < shape.value_dim; ++d) job.out[r * shape.value_dim + d] /= job.sums[r];
  }
}
