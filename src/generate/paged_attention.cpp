// Attention over pages: what a call is cut into, and the kernel for the processor's instructions.
#include <dtensor/generate/paged_attention.hpp>

#include <dtensor/base/vectors/exp_series.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace dtensor::generate {

namespace {

// What a row sees: the places before `seen`, and of the 64 after that those of `tree`.
struct Row {
  int64_t seen;
  uint64_t tree;
  int64_t last;  // place that it sees
};

// One sequence's rows for one key head. S: what pages hold; T: of sums.
template <class S, class T>
struct Rows {
  const S *keys, *values;  // of the layer
  const Block* table;
  int64_t pages, key_heads, key_head, dim, value_dim;  // value_dim is padded
  const Row* rows;
  const T* queries;  // [count, dim], scaled
  int64_t count;
  T *largest, *sums, *out;  // [count], [count], [count, value_dim]
};

#define DTENSOR_KERNEL "src/generate/paged_attention_kernel.inl"
#include <dtensor/base/vectors/instruction_sets.inl>

template <class S, class T>
void attend(const Rows<S, T>& job) {
  DTENSOR_BEST(attend, job);
}

float to_sum(float x) { return x; }
double to_sum(double x) { return x; }
float to_sum(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}
void from_sum(float x, float& to) { to = x; }
void from_sum(double x, double& to) { to = x; }
void from_sum(float x, uint16_t& to) { to = c10::BFloat16(x).x; }

int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// Calls f with a number of what pages hold, and one of what is summed.
template <class F>
void with_dtype(c10::ScalarType dtype, const F& f) {
  switch (dtype) {
    case c10::kFloat: return f(float(), float());
    case c10::kDouble: return f(double(), double());
    case c10::kBFloat16: return f(uint16_t(), float());
    default: fail("generate", "keys and values are float32, bfloat16 or float64; got {}", c10::toString(dtype));
  }
}

// The elements of a tensor [rows, heads, dim] with a dense last dim.
template <class S>
struct Strided {
  explicit Strided(const at::Tensor& x)
      : kept(x.stride(2) == 1 ? x : x.contiguous()), data(static_cast<S*>(kept.data_ptr())), row(kept.stride(0)), head(kept.stride(1)) {}
  S* at(int64_t r, int64_t h) const { return data + r * row + h * head; }
  at::Tensor kept;
  S* data;
  int64_t row, head;
};

constexpr int64_t kRowsOfJob = 16;  // whose queries and sums stay in the first level of cache

// A tile of one span's queries, for one key head.
struct Tile {
  const RowSpan* span;
  int64_t begin, end, key_head;
};

// Memory of tiles, of which a thread works on one after the other.
template <class T>
struct Scratch {
  std::vector<Row> rows;
  std::vector<T> queries, largest, sums, values;

  void begin(int64_t count, int64_t dim, int64_t value_dim) {
    rows.clear();
    queries.resize(count * dim);
    largest.assign(count, -std::numeric_limits<T>::infinity());
    sums.assign(count, 0);
    values.assign(count * value_dim, 0);
  }
};

template <class S, class T>
struct Call {
  const LayerShape& shape;
  const S *keys, *values;
  Strided<S> q, out;
  int64_t group;
  T scale;

  Row row_of(const RowSpan& span, int64_t row) const {
    const auto i = row - span.begin;
    if (!span.sees) return {span.place + i + 1, 0, span.place + i};
    const auto tree = span.sees[i];
    return {span.place, tree, span.place + 63 - (tree == 0 ? 64 : __builtin_clzll(tree))};
  }

  void run(const Tile& tile, Scratch<T>& scratch) const {
    const auto rows = (tile.end - tile.begin) * group, dim = shape.dim, value_dim = padded(shape.value_dim);
    scratch.begin(rows, dim, value_dim);
    int64_t last = -1;
    for (auto row = tile.begin; row < tile.end; ++row) {
      for (int64_t g = 0; g < group; ++g) {
        const auto* from = q.at(row, tile.key_head * group + g);
        auto* to = scratch.queries.data() + static_cast<int64_t>(scratch.rows.size()) * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] = to_sum(from[d]) * scale;
        scratch.rows.push_back(row_of(*tile.span, row));
        last = std::max(last, scratch.rows.back().last);
      }
    }
    attend(Rows<S, T>{.keys = keys,
                      .values = values,
                      .table = tile.span->table,
                      .pages = last / kBlockRows + 1,
                      .key_heads = shape.key_heads,
                      .key_head = tile.key_head,
                      .dim = dim,
                      .value_dim = value_dim,
                      .rows = scratch.rows.data(),
                      .queries = scratch.queries.data(),
                      .count = rows,
                      .largest = scratch.largest.data(),
                      .sums = scratch.sums.data(),
                      .out = scratch.values.data()});
    for (int64_t r = 0; r < rows; ++r) {
      auto* to = out.at(tile.begin + r / group, tile.key_head * group + r % group);
      for (int64_t d = 0; d < shape.value_dim; ++d) from_sum(scratch.values[r * value_dim + d], to[d]);
    }
  }
};

std::vector<Tile> tiles_of(const std::vector<RowSpan>& spans, int64_t key_heads, int64_t group) {
  std::vector<Tile> tiles;
  const auto step = std::max<int64_t>(1, kRowsOfJob / group);
  for (const auto& span : spans) {
    for (int64_t head = 0; head < key_heads; ++head) {
      for (auto begin = span.begin; begin < span.end; begin += step)
        tiles.push_back({&span, begin, std::min(begin + step, span.end), head});
    }
  }
  return tiles;
}

}  // namespace

int64_t LayerShape::bytes_of_block() const {
  return key_heads * kBlockRows * (dim + padded(value_dim)) * static_cast<int64_t>(c10::elementSize(dtype));
}

Pages::Pages(const LayerShape& shape, int64_t blocks) : shape_(shape) {
  const NoSpmd plain;
  const auto options = at::TensorOptions().dtype(shape.dtype);
  keys_ = at::empty({blocks, shape.key_heads, shape.dim, kBlockRows}, options);
  values_ = at::empty({blocks, shape.key_heads, kBlockRows, padded(shape.value_dim)}, options);
}

void Pages::write(const at::Tensor& k, const at::Tensor& v, const std::vector<RowSpan>& spans) const {
  const bool fits = k.dim() == 3 && v.dim() == 3 && k.size(1) == shape_.key_heads && v.size(1) == shape_.key_heads &&
                    k.size(2) == shape_.dim && v.size(2) == shape_.value_dim && k.scalar_type() == shape_.dtype &&
                    v.scalar_type() == shape_.dtype;
  if (!fits) {
    fail("generate", "got keys of {} heads of {} and values of {} ({}); the cache was made for {} heads of {} and {} ({})", k.size(1),
         k.size(2), v.size(2), c10::toString(k.scalar_type()), shape_.key_heads, shape_.dim, shape_.value_dim, c10::toString(shape_.dtype));
  }
  with_dtype(shape_.dtype, [&]<class S>(S, auto) {
    const Strided<S> from_k(k), from_v(v);
    auto* const keys = static_cast<S*>(keys_.data_ptr());
    auto* const values = static_cast<S*>(values_.data_ptr());
    const auto width = padded(shape_.value_dim);
    for (const auto& span : spans) {
      for (auto row = span.begin; row < span.end; ++row) {
        const auto place = span.place + row - span.begin, lane = place % kBlockRows;
        const auto block = static_cast<int64_t>(span.table[place / kBlockRows]) * shape_.key_heads;
        for (int64_t h = 0; h < shape_.key_heads; ++h) {
          auto* to = keys + (block + h) * shape_.dim * kBlockRows + lane;
          const auto* from = from_k.at(row, h);
          for (int64_t d = 0; d < shape_.dim; ++d) to[d * kBlockRows] = from[d];
          auto* value = values + ((block + h) * kBlockRows + lane) * width;
          std::copy_n(from_v.at(row, h), shape_.value_dim, value);
          std::fill(value + shape_.value_dim, value + width, S(0));
        }
      }
    }
  });
}

at::Tensor Pages::attend(const at::Tensor& q, const std::vector<RowSpan>& spans, double scale) const {
  const bool fits = q.dim() == 3 && q.size(2) == shape_.dim && q.scalar_type() == shape_.dtype && q.size(1) % shape_.key_heads == 0;
  if (!fits) {
    fail("generate", "got queries of {} heads of {} ({}); expected a multiple of {} heads, of {} ({})", q.size(1), q.size(2),
         c10::toString(q.scalar_type()), shape_.key_heads, shape_.dim, c10::toString(shape_.dtype));
  }
  const NoSpmd plain;
  const auto group = q.size(1) / shape_.key_heads;
  int64_t rows = 0;
  for (const auto& span : spans) rows += span.end - span.begin;
  const auto sizes = std::vector{q.size(0), q.size(1), shape_.value_dim};
  const auto out = rows == q.size(0) ? at::empty(sizes, q.options()) : at::zeros(sizes, q.options());
  const auto tiles = tiles_of(spans, shape_.key_heads, group);
  with_dtype(shape_.dtype, [&]<class S, class T>(S, T) {
    const Call<S, T> call{shape_,
                          static_cast<const S*>(keys_.data_ptr()),
                          static_cast<const S*>(values_.data_ptr()),
                          Strided<S>(q),
                          Strided<S>(out),
                          group,
                          static_cast<T>(scale)};
    at::parallel_for(0, static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
      Scratch<T> scratch;
      for (auto i = begin; i < end; ++i) call.run(tiles[i], scratch);
    });
  });
  return out;
}

void Pages::copy_block(Block from, Block to) const {  // without operators: each output of a prompt begins with such a copy
  for (const auto* pages : {&keys_, &values_}) {
    const auto bytes = pages->stride(0) * static_cast<int64_t>(pages->element_size());
    auto* const all = static_cast<char*>(pages->data_ptr());
    std::memmove(all + to * bytes, all + from * bytes, bytes);
  }
}

void Pages::copy_place(const Block* table, int64_t from, int64_t to) const {
  const auto place = [table](const at::Tensor& pages, int64_t dim, int64_t at) {
    return pages.select(0, table[at / kBlockRows]).select(dim, at % kBlockRows);
  };
  place(keys_, 2, to).copy_(place(keys_, 2, from));
  place(values_, 1, to).copy_(place(values_, 1, from));
}

}  // namespace dtensor::generate
