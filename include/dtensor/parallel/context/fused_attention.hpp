// Block attention by libtorch's fused kernel for CPUs, which libtorch 2.2 and later have: it knows all keys or causal ones, so a mask is
// taken apart into rectangles and triangles.
#pragma once

#include <dtensor/parallel/context/attention_call.hpp>
#include <dtensor/parallel/context/mask_pieces.hpp>

#if __has_include(<ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>)
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#define DTENSOR_FUSED_CPU_ATTENTION 1
#endif

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::context::detail {

// Whether the kernel can do a call: on CPUs, without dropout, where masks fall into few pieces. Not of half types, whose sums it rounds.
inline bool suits_fused(const at::Tensor& q, const at::Tensor& k, const AttentionCall& call) {
#ifdef DTENSOR_FUSED_CPU_ATTENTION
  if (!q.is_cpu() || (q.scalar_type() != at::kFloat && q.scalar_type() != at::kDouble) || q.numel() == 0 || k.numel() == 0) return false;
  return !call.dropout && std::ranges::all_of(call.masks, [](const auto* mask) { return mask->pieces.has_value(); });
#else
  (void)q, (void)k, (void)call;
  return false;
#endif
}

#ifdef DTENSOR_FUSED_CPU_ATTENTION

// Tensors [batch, heads, rows, ...] of queries and of keys where a piece lies: of the batch rows that have it, and of one query head for
// each key head. The kernel wants as many of either, and so heads that share key heads go one after the other.
class PieceView {
 public:
  PieceView(const MaskPiece& piece, Interval batch, int64_t member, int64_t group, bool is_first = true)
      : piece_(piece), batch_(batch), member_(member), group_(group), is_first_(is_first) {}

  at::Tensor queries(const at::Tensor& x) const {
    const auto own = x.narrow(0, batch_.begin, batch_.length()).narrow(2, piece_.queries.begin, piece_.queries.length());
    return group_ == 1 ? own : own.slice(1, member_, x.size(1), group_);
  }
  at::Tensor keys(const at::Tensor& x) const {
    return x.narrow(0, batch_.begin, batch_.length()).narrow(2, piece_.keys.begin, piece_.keys.length());
  }
  bool causal() const { return piece_.causal; }
  bool is_first() const { return is_first_; }  // of all pieces, to have any of its queries

 private:
  const MaskPiece& piece_;
  const Interval batch_;
  const int64_t member_, group_;
  const bool is_first_;
};

template <class F>
void for_each_piece(const AttentionCall& call, const at::Tensor& q, const at::Tensor& k, const F& f) {
  const auto group = q.size(1) / k.size(1);
  const auto masks = static_cast<int64_t>(call.masks.size());
  for (int64_t m = 0; m < masks; ++m) {
    const auto& pieces = *call.masks[m]->pieces;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto& rows = pieces[i].queries;
      const bool is_first = std::none_of(pieces.begin(), pieces.begin() + i, [&](const MaskPiece& before) {
        return before.queries.begin < rows.end && rows.begin < before.queries.end;
      });
      for (int64_t member = 0; member < group; ++member) {
        f(PieceView(pieces[i], masks == 1 ? Interval{0, q.size(0)} : Interval{m, m + 1}, member, group, is_first));
      }
    }
  }
}

inline Attended fused_attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const AttentionCall& call) {
  const auto q = with_dense_rows(q_in), k = with_dense_rows(k_in), v = with_dense_rows(v_in);
  const auto dtype = sums_of(q);
  const auto run = [&](const PieceView& view) {
    auto [out, lse] =
        at::_scaled_dot_product_flash_attention_for_cpu(view.queries(q), view.keys(k), view.keys(v), 0, view.causal(), {}, call.scale);
    return Attended{out.to(dtype), lse.to(dtype).contiguous()};
  };
  const auto& pieces = *call.masks[0]->pieces;
  if (call.masks.size() == 1 && pieces.size() == 1 && pieces[0].queries.length() == q.size(2) && q.size(1) == k.size(1)) {
    return run(PieceView(pieces[0], {0, q.size(0)}, 0, 1));
  }
  const auto all = nothing_seen(q);
  for_each_piece(call, q, k, [&](const PieceView& view) {
    const Attended before{view.queries(all.out), view.queries(all.lse)}, more = run(view);
    if (!view.is_first()) return merge(before, more);
    before.out.copy_(more.out);
    before.lse.copy_(more.lse);
  });
  return all;
}

// Adds to the part of a gradient that `view` gives. What is all there is so far becomes the gradient.
template <class View>
void add_part(at::Tensor& gradient, const at::Tensor& like, const at::Tensor& part, const View& view) {
  if (!gradient.defined()) {
    if (part.sizes() == like.sizes()) return void(gradient = part);
    gradient = at::zeros(like.sizes(), like.options());
  }
  view(gradient).add_(part);
}

inline void add_fused_gradients(BlockGradients& into, const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                                const OutputGradient& of, const AttentionCall& call) {
  const auto q = with_dense_rows(q_in), k = with_dense_rows(k_in), v = with_dense_rows(v_in);
  const auto grad = with_dense_rows(of.grad), out = with_dense_rows(of.out);
  for_each_piece(call, q, k, [&](const PieceView& view) {
    const auto [dq, dk, dv] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(view.queries(grad), view.queries(q), view.keys(k), view.keys(v),
                                                                 view.queries(out), view.queries(of.lse), 0, view.causal(), {}, call.scale);
    const auto queries = [&](const at::Tensor& x) { return view.queries(x); };
    const auto keys = [&](const at::Tensor& x) { return view.keys(x); };
    add_part(into.dq, q, dq, queries);
    add_part(into.dk, k, dk, keys);
    add_part(into.dv, v, dv, keys);
  });
}

#else

inline Attended fused_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const AttentionCall&) { return {}; }
inline void add_fused_gradients(BlockGradients&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const OutputGradient&,
                                const AttentionCall&) {}

#endif

}  // namespace dtensor::context::detail

#pragma GCC visibility pop
