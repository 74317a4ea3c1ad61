#include "rng/own_shard.hpp"

#include "rng/counter_generator.hpp"
#include "rng/cuda/draw.hpp"
#include "rng/memory_order.hpp"
#include "rng/stream.hpp"

#include <dtensor/redistribute/redistribute.hpp>
#include <dtensor/rng/random.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <limits>

namespace dtensor::rng {

namespace {

// The elements that a rank holds, with the dims in the given order. The whole tensor is seen as rows: a row is the last sharded dim with
// all dims after it. Under a flat layout, some elements at both ends belong to other ranks.
class Rows {
 public:
  // Consecutive rows of which this rank holds the same elements, at least one of each.
  struct Block {
    int64_t first, count;
    Intervals in_row;
    int64_t own_row;  // elements of them
  };

  Rows(const Layout& layout, const Sizes& order) {
    for (const auto d : order) {
      lengths_.push_back(layout.sizes()[d]);
      held_.push_back(layout.intervals(d, layout.mesh().coordinate()));
    }
    if (layout.ndim() == 0) {  // one row of one element
      cut_ = 0;
      in_row_ = {{0, 1}};
      own_row_ = 1;
      return;
    }
    for (cut_ = layout.ndim() - 1; cut_ > 0 && whole(cut_);) --cut_;
    for (int64_t d = cut_; d < layout.ndim(); ++d) row_ *= lengths_[d];
    if (layout.is_flat()) own_ = layout.flat_shard(layout.mesh().coordinate());
    for (const auto& part : held_[cut_]) {
      const int64_t inner = row_ / std::max<int64_t>(lengths_[cut_], 1);
      in_row_.push_back({part.begin * inner, part.end * inner});
      own_row_ += in_row_.back().length();
    }
  }

  int64_t length() const { return row_; }              // elements of a row

  // Whether to draw run by run and skip what lies between. Else it draws whole rows.
  bool in_long_runs() const {
    constexpr int64_t kLong = 1024;
    const auto is_long = [](const Interval& run) { return run.length() >= kLong; };
    return row_ > Stream::kWindow || std::ranges::all_of(in_row_, is_long);
  }

  // Calls body(Block), ascending.
  template <class Body>
  void for_each(const Body& body) const {
    int64_t before = 0;  // elements that the other placements leave
    for_rows(0, 0, [&](int64_t first, int64_t count) {
      for_own(first, count, before, body);
      before += count * own_row_;
    });
  }

 private:
  // This rank's elements of these rows: a piece of the first and the last row, and the whole rows between them.
  template <class Body>
  void for_own(int64_t first, int64_t count, int64_t before, const Body& body) const {
    if (own_row_ == 0) return;
    const int64_t begin = std::max<int64_t>(own_.begin - before, 0), end = std::min(own_.end - before, count * own_row_);
    for (int64_t at = begin; at < end;) {
      const int64_t row = at / own_row_, in_row = at % own_row_, rows = in_row == 0 ? (end - at) / own_row_ : 0;
      if (rows > 0) {
        body(Block{first + row, rows, in_row_, own_row_});
        at += rows * own_row_;
      } else {
        const int64_t length = std::min(own_row_ - in_row, end - at);
        body(Block{first + row, 1, shard_of_row({in_row, in_row + length}), length});
        at += length;
      }
    }
  }

  // `own` is an interval of the elements of a row that the other placements leave to this rank.
  Intervals shard_of_row(Interval own) const {
    Intervals part;
    int64_t before = 0;
    for (const auto& run : in_row_) {
      const Interval next{run.begin + std::max<int64_t>(own.begin - before, 0), run.begin + std::min(own.end - before, run.length())};
      if (next.length() > 0) part.push_back(next);
      before += run.length();
    }
    return part;
  }

  bool whole(int64_t d) const { return held_[d].size() == 1 && held_[d][0].length() == lengths_[d]; }

  template <class Body>
  void for_rows(int64_t d, int64_t base, const Body& body) const {
    if (d >= cut_) return body(base, int64_t{1});
    int64_t rows_of_one = 1;
    bool rest_whole = true;
    for (int64_t i = d + 1; i < cut_; ++i) {
      rows_of_one *= lengths_[i];
      rest_whole &= whole(i);
    }
    for (const auto& part : held_[d]) {
      if (rest_whole) {
        body((base * lengths_[d] + part.begin) * rows_of_one, part.length() * rows_of_one);
      } else {
        for (int64_t i = part.begin; i < part.end; ++i) for_rows(d + 1, base * lengths_[d] + i, body);
      }
    }
  }

  Sizes lengths_;
  std::vector<Intervals> held_;
  int64_t cut_ = 0, row_ = 1, own_row_ = 0;
  Intervals in_row_;  // of the elements of a row, those that are this rank's, but for a flat cut
  Interval own_{0, std::numeric_limits<int64_t>::max()};
};

void keep_long_runs(Stream& stream, const Rows& part, const Rows::Block& block, at::Tensor to) {
  int64_t at = 0;
  for (int64_t row = block.first; row < block.first + block.count; ++row) {
    for (const auto& run : block.in_row) {
      for (int64_t begin = run.begin; begin < run.end; begin += Stream::kWindow) {
        const int64_t end = std::min(run.end, begin + Stream::kWindow);
        to.narrow(0, at, end - begin).copy_(stream.window(row * part.length() + begin, row * part.length() + end));
        at += end - begin;
      }
    }
  }
}

// Draws as many rows at once as fit in a window.
void keep_short_runs(Stream& stream, const Rows& part, const Rows::Block& block, at::Tensor to) {
  const auto own = to.view({block.count, block.own_row});
  const int64_t step = Stream::kWindow / part.length();
  for (int64_t begin = 0; begin < block.count; begin += step) {
    const int64_t count = std::min(step, block.count - begin), first = block.first + begin;
    const auto drawn = stream.window(first * part.length(), (first + count) * part.length()).view({count, part.length()});
    int64_t at = 0;
    for (const auto& run : block.in_row) {
      own.narrow(0, begin, count).narrow(1, at, run.length()).copy_(drawn.narrow(1, run.begin, run.length()));
      at += run.length();
    }
  }
}

bool is_contiguous(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const auto dense = contiguous_strides(sizes);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != dense[d]) return false;
  }
  return true;
}

// Complex numbers are drawn as twice as many real ones.
bool in_parts(const Draw& draw, int64_t numel) {
  return numel >= Stream::kSmall && !at::isComplexType(c10::typeMetaToScalarType(draw.options.dtype()));
}

// With a counter-based generator each element is drawn by itself, by its row-major index.
at::Tensor draw_by_index(const Layout& layout, const Draw& draw, CounterGenerator& generator) {
  const auto order = memory_order(contiguous_strides(layout.sizes()));
  const Rows part(layout, order);
  const Runs runs = [&](const std::function<void(const Interval&)>& visit) {
    part.for_each([&](const Rows::Block& block) {
      for (int64_t row = block.first; row < block.first + block.count; ++row) {
        for (const auto& run : block.in_row) visit({row * part.length() + run.begin, row * part.length() + run.end});
      }
    });
  };
  const auto own = at::empty(layout.local_sizes(), draw.options);
  if (c10::multiply_integers(layout.sizes()) == 0) return own;
  draw_by_counter(draw, generator, own, {runs, [&] { return cuda::shard_index(layout, order.data()); }});
  if (is_contiguous(layout.sizes(), layout.strides())) return own;
  const auto strides = at::infer_dense_strides(layout.local_sizes(), layout.strides());
  return at::empty_strided(layout.local_sizes(), strides, draw.options).copy_(own);
}

}  // namespace

// What the tensor's ranks draw, a rank that is not among them skips.
static at::Tensor absent_shard(const Layout& layout, const Draw& draw, const at::Generator& generator) {
  const Draw here{draw.op, draw.arguments, draw.options.device(c10::Device(layout.mesh().device_type()))};
  if (!RankLocalRandom::active()) skip_draw(layout.sizes(), layout.strides(), here, generator);
  return at::empty(layout.local_sizes(), draw.options.device(at::kMeta));
}

at::Tensor draw_own_shard(const Layout& layout, const Draw& draw, at::Generator generator) {
  if (layout.is_absent()) return absent_shard(layout, draw, generator);
  if (RankLocalRandom::active()) {
    const auto own = at::empty_strided(layout.local_sizes(), at::infer_dense_strides(layout.local_sizes(), layout.strides()), draw.options);
    draw.fill(own, generator);
    return own;
  }
  if (auto* counter = as_counter(generator)) return draw_by_index(layout, draw, *counter);
  const int64_t numel = c10::multiply_integers(layout.sizes());
  const bool cut = layout.local_sizes() != layout.sizes();
  if (cut && draw.options.device().is_cuda()) {
    if (const auto own = cuda::draw_own_shard(layout, draw, generator); own.defined()) return own;
  } else if (cut && in_parts(draw, numel)) {
    Stream stream(generator, draw, numel, is_contiguous(layout.sizes(), layout.strides()));
    if (stream.divisible()) {
      const auto order = memory_order(layout.strides());
      const Rows part(layout, order);
      const auto own = at::empty({c10::multiply_integers(layout.local_sizes())}, draw.options);
      const auto keep = part.in_long_runs() ? keep_long_runs : keep_short_runs;
      int64_t at = 0;
      part.for_each([&](const Rows::Block& block) {
        const int64_t elements = block.count * block.own_row;
        keep(stream, part, block, own.narrow(0, at, elements));
        at += elements;
      });
      stream.finish();
      return in_place(own, layout, order);
    }
  }
  const auto whole = at::empty_strided(layout.sizes(), layout.strides(), draw.options);
  draw.fill(whole, generator);
  return own_shard(whole, layout);
}

void skip_draw(c10::IntArrayRef sizes, c10::IntArrayRef strides, const Draw& draw, at::Generator generator) {
  const int64_t numel = c10::multiply_integers(sizes);
  if (auto* counter = as_counter(generator)) {
    if (numel > 0) counter->draw();
    return;
  }
  if (draw.options.device().is_cuda()) {
    if (cuda::skip_draw(numel, draw, generator)) return;
  } else if (in_parts(draw, numel)) {
    Stream stream(generator, draw, numel, is_contiguous(sizes, strides));
    if (stream.divisible()) return stream.finish();
  }
  draw.fill(at::empty_strided(sizes, strides, draw.options), generator);
}

}  // namespace dtensor::rng
