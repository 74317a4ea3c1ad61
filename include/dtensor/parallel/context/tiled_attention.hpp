// Block attention in tiles of scores, under any mask, of any floating-point dtype and on any device.
#pragma once

#include <dtensor/parallel/context/attention_call.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#pragma GCC visibility push(default)

namespace dtensor::context::detail {

constexpr int64_t kQueries = 128, kKeys = 512;  // of a tile: its scores stay in the second level of cache

// Calls f(batch, key head) for each.
template <class F>
void for_each_key_head(const at::Tensor& k, const F& f) {
  for (int64_t b = 0; b < k.size(0); ++b) {
    for (int64_t h = 0; h < k.size(1); ++h) f(b, h);
  }
}

// Calls f(rows) for tiles of at most `most` of them.
template <class F>
void for_each_tile(int64_t rows, int64_t most, const F& f) {
  for (int64_t begin = 0; begin < rows; begin += most) f(Interval{begin, std::min(begin + most, rows)});
}

// The rows of a group of heads that share a key head, one head after the other: [group * rows, ...] of a tensor [batch, heads, rows, ...].
inline at::Tensor rows_of_group(const at::Tensor& x, int64_t batch, int64_t head, int64_t group, const Interval& rows) {
  const auto tile = x.select(0, batch).narrow(0, head * group, group).narrow(1, rows.begin, rows.length());
  return x.dim() == 4 ? tile.reshape({-1, x.size(3)}) : tile.reshape({-1, 1});
}

inline at::Tensor tile_of(const at::Tensor& x, const Interval& rows) { return x.narrow(0, rows.begin, rows.length()); }

// Buffers and constants of the tiles of one call.
class Tiles {
 public:
  Tiles(const at::Tensor& q, const at::Tensor& k, const AttentionCall& call)
      : call_(call),
        group_(q.size(1) / std::max<int64_t>(k.size(1), 1)),
        queries_(std::max<int64_t>(1, kQueries / std::max<int64_t>(group_, 1))),
        options_(q.options().dtype(sums_of(q))),
        hidden_(at::empty({queries_ * kKeys}, q.options().dtype(at::kBool).device(at::kCPU))),
        dropped_(at::empty({call.dropout ? group_ * queries_ * kKeys : 0}, hidden_.options())) {}

  int64_t group() const { return group_; }
  int64_t queries() const { return queries_; }
  const at::TensorOptions& options() const { return options_; }

  // Whether the mask hides all of a tile, which is then to be left out. Otherwise hide() writes `value` where it hides a key.
  bool hides(int64_t batch, const Interval& q, const Interval& k) {
    const auto& mask = call_.masks[call_.masks.size() == 1 ? 0 : batch]->mask;
    cover_ = mask.cover(q, k);
    if (cover_ != Cover::some) return cover_ == Cover::none;
    mask.write_hidden(q, k, hidden_.data_ptr<bool>());
    return false;
  }
  void hide(const at::Tensor& scores, const Interval& q, const Interval& k, double value) const {
    if (cover_ != Cover::some) return;
    const auto hidden = hidden_.narrow(0, 0, q.length() * k.length()).view({q.length(), k.length()}).to(scores.device());
    scores.view({group_, q.length(), k.length()}).masked_fill_(hidden, value);
  }

  // Of the weights of a tile, those that the call drops: bool, as weights lie in the kernels; undefined where it drops none. Until the next
  // call. Those that stay are scaled by kept_scale().
  at::Tensor dropped(int64_t batch, int64_t key_head, const Interval& q, const Interval& k) const {
    if (!call_.dropout) return {};
    const auto of = [](std::span<const int64_t> positions, const Interval& rows) { return positions.subspan(rows.begin, rows.length()); };
    const auto size = q.length() * k.length();
    for (int64_t member = 0; member < group_; ++member) {
      const auto head = call_.first_head + key_head * group_ + member;
      write_dropped(*call_.dropout, batch, head, of(call_.queries, q), of(call_.keys, k), dropped_.data_ptr<bool>() + member * size);
    }
    return dropped_.narrow(0, 0, group_ * size).view({-1, k.length()}).to(options_.device());
  }
  double kept_scale() const { return call_.dropout ? call_.dropout->scale() : 1; }

 private:
  const AttentionCall& call_;
  const int64_t group_, queries_;
  const at::TensorOptions options_;
  const at::Tensor hidden_, dropped_;
  Cover cover_ = Cover::all;
};

// The softmax of rows whose scores come tile after tile.
class RunningSoftmax {
 public:
  RunningSoftmax(int64_t rows, int64_t dim, const at::TensorOptions& options)
      : largest_(at::full({rows, 1}, kNothing, options)), sum_(at::zeros({rows, 1}, options)), values_(at::zeros({rows, dim}, options)) {}

  // `scores` are used up. Where weights are `dropped`, their values do not count, though they do in the sum.
  void add(const at::Tensor& scores, const at::Tensor& values, const at::Tensor& dropped) {
    const auto largest = at::maximum(largest_, scores.amax(1, /*keepdim=*/true));
    const auto finite = largest.masked_fill(largest.eq(kNothing), 0);  // of a query that has seen nothing yet
    const auto weights = scores.sub_(finite).exp_();
    const auto shrunk = largest_.sub_(finite).exp_();
    sum_.mul_(shrunk).add_(weights.sum(1, /*keepdim=*/true));
    if (dropped.defined()) weights.masked_fill_(dropped, 0);
    values_.mul_(shrunk).addmm_(weights, values);
    largest_ = largest;
  }

  at::Tensor out() const { return values_.div(sum_.masked_fill(sum_.eq(0), 1)); }
  at::Tensor lse() const { return largest_.add(sum_.log()); }

 private:
  at::Tensor largest_, sum_, values_;
};

inline Attended tiled_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  Tiles tiles(q, k, call);
  auto result = nothing_seen(q);
  for_each_key_head(k, [&](int64_t b, int64_t h) {
    const auto keys = k[b][h].to(tiles.options()), values = v[b][h].to(tiles.options());
    for_each_tile(q.size(2), tiles.queries(), [&](const Interval& rows) {
      const auto queries = rows_of_group(q, b, h, tiles.group(), rows).to(tiles.options()).mul(call.scale);
      RunningSoftmax softmax(queries.size(0), q.size(3), tiles.options());
      bool any = false;
      for_each_tile(k.size(2), kKeys, [&](const Interval& columns) {
        if (tiles.hides(b, rows, columns)) return;
        const auto scores = at::mm(queries, tile_of(keys, columns).t());
        tiles.hide(scores, rows, columns, kNothing);
        softmax.add(scores, tile_of(values, columns), tiles.dropped(b, h, rows, columns));
        any = true;
      });
      if (!any) return;
      const auto place = [&](const at::Tensor& all) {
        return all[b].narrow(0, h * tiles.group(), tiles.group()).narrow(1, rows.begin, rows.length());
      };
      place(result.out).copy_(softmax.out().mul_(tiles.kept_scale()).view({tiles.group(), rows.length(), q.size(3)}));
      place(result.lse).copy_(softmax.lse().view({tiles.group(), rows.length()}));
    });
  });
  return result;
}

inline void add_tiled_gradients(const BlockGradients& into, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const OutputGradient& of, const AttentionCall& call) {
  Tiles tiles(q, k, call);
  const auto all_deltas = of.deltas(), no_weights = of.lse.masked_fill(of.lse.eq(kNothing), -kNothing);  // of queries that saw nothing
  for_each_key_head(k, [&](int64_t b, int64_t h) {
    const auto keys = k[b][h].to(tiles.options()), values = v[b][h].to(tiles.options());
    const auto dk = into.dk[b][h], dv = into.dv[b][h];
    for_each_tile(q.size(2), tiles.queries(), [&](const Interval& rows) {
      const auto of_group = [&](const at::Tensor& x) { return rows_of_group(x, b, h, tiles.group(), rows).to(tiles.options()); };
      const auto queries = of_group(q).mul(call.scale), grads = of_group(of.grad);
      const auto lses = of_group(no_weights), deltas = of_group(all_deltas);
      const auto dq = at::zeros(queries.sizes(), tiles.options());
      for_each_tile(k.size(2), kKeys, [&](const Interval& columns) {
        if (tiles.hides(b, rows, columns)) return;
        const auto some_keys = tile_of(keys, columns);
        const auto weights = at::mm(queries, some_keys.t()).sub_(lses).exp_();
        tiles.hide(weights, rows, columns, 0);
        const auto dropped = tiles.dropped(b, h, rows, columns);
        const auto kept = [&](const at::Tensor& x) { return dropped.defined() ? x.masked_fill(dropped, 0).mul_(tiles.kept_scale()) : x; };
        tile_of(dv, columns).addmm_(kept(weights).t(), grads);
        const auto dscores = kept(at::mm(grads, tile_of(values, columns).t())).sub_(deltas).mul_(weights);
        dq.addmm_(dscores, some_keys);
        tile_of(dk, columns).addmm_(dscores.t(), queries);
      });
      into.dq[b]
          .narrow(0, h * tiles.group(), tiles.group())
          .narrow(1, rows.begin, rows.length())
          .add_(dq.mul_(call.scale).view({tiles.group(), rows.length(), q.size(3)}));
    });
  });
}

}  // namespace dtensor::context::detail

#pragma GCC visibility pop
