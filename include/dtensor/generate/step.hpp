// One forward pass of a decoder: some rows of each of several sequences, with the keys and values of earlier rows in pages.
#pragma once

#include <dtensor/collectives/pieces.hpp>
#include <dtensor/generate/paged_attention.hpp>
#include <dtensor/tensor/custom_op.hpp>
#include <dtensor/tensor/decoding.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// What a pass computes. Rows in no span are there to make their number a round one.
struct StepRows {
  Tokens ids, positions;        // of each row
  std::vector<RowSpan> spans;   // of sequences, in the order of rows
  std::vector<int64_t> scored;  // rows whose scores are wanted, in order

  int64_t rows() const { return static_cast<int64_t>(ids.size()); }
};

// With rows and scored ones in round numbers: on a mesh each new size of an operator has to be decided.
StepRows padded(StepRows rows);

// The spans' rows in at most `count` parts, of about equally many rows and in their order. All rows of a sequence are in one part.
std::vector<StepRows> in_parts(const StepRows& rows, int64_t count);

// How each layer's heads lie on a mesh. The first pass notes it, and later passes keep to it: with another number of rows queries may lie
// in another way, but a rank's pages are those of its heads.
using HeadPlacements = std::vector<Placements>;

// What the layers of a model are given while a pass runs. Each call of attention is the next layer's.
class Step : public Decoding {
 public:
  Step(World& world, const StepRows& rows, HeadPlacements& heads) : Decoding(world), rows_(rows), heads_(heads) {}
  ~Step() override;  // compiled with the library, as all that is virtual

  at::Tensor positions(int64_t rows, int64_t limit) override;
  bool shares_heads(const at::Tensor& q, int64_t key_heads) override;
  // Refuses what a decoder cannot do: a mask of the model's own, attention to later positions, dropout.
  at::Tensor attention(const AttentionArguments& arguments) override;
  at::Tensor scored_rows(const at::Tensor& x) override;

  bool picked() const { return picked_; }   // whether the model scores the wanted rows only
  int64_t limit() const { return limit_; }  // of positions, that the model named; 0: none

 protected:
  // q [rows, heads, dim], k and v with key heads, plain and this rank's: as `layer`-th layer -> [rows, heads, value dim].
  virtual at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) = 0;

  const StepRows& rows_;
  HeadPlacements& heads_;
  Step* whole_ = nullptr;  // of which this is a part

 private:
  const Placements& next_heads(const Layout& q);

  at::Tensor positions_, scored_;
  int64_t layer_ = 0, limit_ = 0;
  bool picked_ = false;
};

// With pages.
class PagedStep final : public Step {
 public:
  PagedStep(World& world, const StepRows& rows, HeadPlacements& heads, const std::vector<Pages>& layers)
      : Step(world, rows, heads), layers_(layers) {}
  ~PagedStep() override;
  // Some of the rows of another one, which go through the model by themselves.
  PagedStep(World& world, const StepRows& rows, PagedStep& whole) : PagedStep(world, rows, whole.heads_, whole.layers_) { whole_ = &whole; }

  const StepRows& rows() const { return rows_; }

 protected:
  at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) override;

 private:
  const std::vector<Pages>& layers_;
};

// Without: the rows are one sequence from its begin. Notes what pages this rank would need.
class MeasuringStep final : public Step {
 public:
  using Step::Step;
  ~MeasuringStep() override;
  std::vector<LayerShape> shapes;

 protected:
  at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) override;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// A plain tensor of numbers.
inline at::Tensor plain_tensor(const Tokens& numbers) {
  const NoSpmd plain;
  return at::tensor(numbers, at::kLong);
}

// The same, which inside Spmd lies whole on every rank of the mesh. Ranks do not compare it: groups may have other ones (groups.hpp).
inline at::Tensor whole_tensor(const Tokens& numbers) {
  const auto plain = plain_tensor(numbers);
  const auto* mesh = Spmd::current();
  if (!mesh) return plain;
  return from_local(plain, *mesh, Placements(mesh->ndim(), replicate()), plain.sizes());
}

// Plain x [1, heads, rows, dim] as [rows, heads, dim], and back, by one view.
inline at::Tensor rows_first(const at::Tensor& x) {
  return x.as_strided({x.size(2), x.size(1), x.size(3)}, {x.stride(2), x.stride(1), x.stride(3)});
}
inline at::Tensor heads_first(const at::Tensor& x) {
  return x.as_strided({1, x.size(1), x.size(0), x.size(2)}, {x.numel(), x.stride(1), x.stride(0), x.stride(2)});
}

// How attention lies on a mesh: heads may be cut, all else is whole.
inline Placements by_heads(const Layout& layout) {
  Placements placements;
  for (const auto& placement : layout.placements()) placements.push_back(placement == shard(1) ? placement : replicate());
  return placements;
}

}  // namespace detail

inline StepRows padded(StepRows rows) {
  const auto round = [](int64_t count) {
    int64_t size = 1;
    while (size < count && size < 64) size *= 2;
    return size < count ? (count + 63) / 64 * 64 : size;
  };
  rows.ids.resize(round(rows.rows()), 0);
  rows.positions.resize(rows.ids.size(), 0);
  rows.scored.resize(std::min(round(static_cast<int64_t>(rows.scored.size())), rows.rows()), 0);
  return rows;
}

inline std::vector<StepRows> in_parts(const StepRows& rows, int64_t count) {
  const auto& spans = rows.spans;
  std::vector<StepRows> parts;
  const auto most = spans.empty() ? 0 : (spans.back().end + count - 1) / count;
  for (size_t first = 0, scored = 0, last; first < spans.size(); first = last) {
    const auto begin = spans[first].begin;
    const bool is_last = static_cast<int64_t>(parts.size()) + 1 == count;
    for (last = first + 1; last < spans.size(); ++last) {
      const bool same = spans[last].table == spans[last - 1].table;
      if (!same && !is_last && spans[last].end - begin > most) break;
    }
    const auto end = spans[last - 1].end;
    auto& part = parts.emplace_back();
    part.ids.assign(rows.ids.begin() + begin, rows.ids.begin() + end);
    part.positions.assign(rows.positions.begin() + begin, rows.positions.begin() + end);
    for (size_t i = first; i < last; ++i) {
      part.spans.push_back(spans[i]);
      part.spans.back().begin -= begin, part.spans.back().end -= begin;
    }
    for (; scored < rows.scored.size() && rows.scored[scored] >= begin && rows.scored[scored] < end; ++scored)
      part.scored.push_back(rows.scored[scored] - begin);
  }
  return parts;
}

inline at::Tensor Step::positions(int64_t rows, int64_t limit) {
  require(rows == rows_.rows(), "generate", "the model asked for the positions of {} rows; expected {}", rows, rows_.rows());
  if (limit > 0) {
    limit_ = limit;
    const auto last = std::ranges::max(rows_.positions);
    require(last < limit, "generate", "a sequence of {} tokens is longer than the {} positions of the model; hint: max_length", last + 1,
            limit);
  }
  if (!positions_.defined()) positions_ = detail::whole_tensor(rows_.positions);
  return positions_;
}

// Of the layer whose attention comes next.
inline const Placements& Step::next_heads(const Layout& q) {
  if (static_cast<size_t>(layer_) >= heads_.size()) heads_.resize(layer_ + 1);
  auto& heads = heads_[layer_];
  if (heads.empty()) heads = detail::by_heads(q);
  return heads;
}

inline bool Step::shares_heads(const at::Tensor& q, int64_t key_heads) {
  if (!is_dtensor(q)) return true;
  const auto& layout = *find_layout(q);
  const auto& heads = next_heads(layout);
  int64_t ranks = 1;
  for (int64_t d = 0; d < layout.mesh().ndim(); ++d) {
    if (heads[d] == shard(1)) ranks *= layout.mesh().size(d);
  }
  return key_heads % ranks == 0;
}

inline at::Tensor Step::scored_rows(const at::Tensor& x) {
  picked_ = true;
  if (whole_) whole_->picked_ = true;
  if (!scored_.defined()) scored_ = detail::whole_tensor(rows_.scored);
  return x.index_select(1, scored_);
}

inline at::Tensor Step::attention(const AttentionArguments& a) {
  const bool fits = a.q.dim() == 4 && a.k.dim() == 4 && a.v.dim() == 4 && a.q.size(0) == 1 && a.q.size(2) == rows_.rows() &&
                    a.k.size(2) == rows_.rows() && a.v.size(2) == rows_.rows();
  if (!fits) {
    fail("generate", "attention got q {} and k {}; expected [1, heads, {}, dim]", dtensor::detail::str_of(a.q.sizes()),
         dtensor::detail::str_of(a.k.sizes()), rows_.rows());
  }
  require(a.causal && !a.mask.defined() && a.dropout == 0, "generate",
          "attention got {}; a decoder computes causal attention, without a mask of the model's own and without dropout",
          a.mask.defined() ? "a mask"
          : a.dropout > 0  ? "a dropout"
                           : "all positions to attend to");
  const auto layer = layer_;
  const auto scale = a.scale > 0 ? a.scale : 1 / std::sqrt(static_cast<double>(a.q.size(3)));
  const auto run = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return detail::heads_first(attend(layer, detail::rows_first(q), detail::rows_first(k), detail::rows_first(v), scale));
  };
  const auto* layout = is_dtensor(a.q) ? find_layout(a.q) : nullptr;
  const auto all = layout ? next_heads(*layout) : Placements{};
  ++layer_;
  if (!layout) return run(a.q, a.k, a.v);
  LocalMapOptions options;
  options.out_sizes = {{1, a.q.size(1), a.q.size(2), a.v.size(3)}};
  return local_map(run, layout->mesh(), {all, all, all}, {all}, options)(a.q, a.k, a.v);
}

inline at::Tensor PagedStep::attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  require(layer < static_cast<int64_t>(layers_.size()), "generate", "the model called attention {} times; expected {}", layer + 1,
          layers_.size());
  if (k.size(1) == 0) return at::empty({q.size(0), 0, v.size(2)}, q.options());
  layers_[layer].write(k, v, rows_.spans);
  return layers_[layer].attend(q, rows_.spans, scale);
}

inline at::Tensor MeasuringStep::attend(int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  shapes.push_back({k.size(1), k.size(2), v.size(2), k.scalar_type()});
  using detail::heads_first;
  return detail::rows_first(detail::attend_by_pages(heads_first(q), heads_first(k), heads_first(v), scale));
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
