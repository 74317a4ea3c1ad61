// A mixture of experts, computed where the experts lie: each token's chosen feed-forward layers, weighted and added.
//
//   y = dt::mix_experts(x, experts, weights, {w1, w2, w3});
//
// On plain tensors one device computes it. On distributed ones the layout of the weights decides: a mesh dimension that cuts them along
// their experts makes tokens travel, one that cuts them along their hidden width makes the result a pending sum, and along all others each
// rank computes its own tokens.
#pragma once

#include <dtensor/parallel/expert/deduplicated.hpp>
#include <dtensor/parallel/expert/dispatch.hpp>
#include <dtensor/parallel/expert/feed_forward.hpp>
#include <dtensor/parallel/expert/plan.hpp>
#include <dtensor/parallel/expert/tiles.hpp>
#include <dtensor/tensor/custom_op.hpp>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

// How tokens come to experts that lie on other ranks.
struct MixOptions {
  //   alltoall      each row to the rank of its expert, and back: exact numbers, no padding. Experts compute the rows of one device in
  //                 their order, so outputs and the experts' gradients have its bits where nothing but experts and tokens is cut
  //   deduplicated  each token once to each rank that has any of its experts, where its results are weighted and added: less where a
  //                 token has several experts on a rank
  //   allgather     every rank gets all tokens of the group, and its experts' share of the result is reduced: less where a token has
  //                 more experts than there are ranks
  //   automatic     what takes the least time by the prices of set_comm_cost
  std::string dispatch = "alltoall";
  // Where each expert chose its tokens, and `experts` has a column for every one of them: how many a token has on average, which
  // `automatic` reckons with. 0: tokens chose, and have as many as there are columns.
  int64_t mean_choices = 0;
  std::string layer = "";  // its name in errors; empty: that of the weights' module
  bool error_if_nonfinite = true;
  // What rows are while they travel to experts, and results on their way back, by alltoall and deduplicated; gradients of each as they
  // were: exact, bfloat16, or blocks8, a byte a number and a scale for 128 of them (expert::Wire has the errors).
  std::string rows = "exact", results = "exact";
  // By alltoall and deduplicated: so many parts of each rank's tokens, of which one is computed while others travel. It pays where rows
  // wait for a network. Experts multiply fewer rows at once, and gradients are added in another order.
  int64_t tiles = 1;
  // By alltoall: rows are put straight into the memory of their ranks (SymmetricMemory), where these share it; elsewhere they are sent.
  // The same bits. A little faster with shm, not with threads.
  bool put = false;
};

// x [..., dim], `experts` int64 [..., k] (each token's, -1: none), `weights` [..., k] of any floating dtype; w.w1 [experts, hidden, dim],
// w.w2 [experts, dim, hidden], w.w3 as w1 or undefined -> [..., dim], laid out as x, and whole where x was a pending sum.
//
// Differentiable in all but `experts`. Gradients are sums over all tokens, on any mesh. Every rank takes part in all that is communicated,
// also one without tokens or whose experts nobody chose. Communicates, for alltoall, one all_gather of counts and two all_to_all, and two
// more in backward; for deduplicated four all_to_all and one of counts, and three in backward; for allgather an all_gather and a
// reduce_scatter, and as many in backward; in tiles, for each of them. Throws for sizes that do not fit, an expert that there is not,
// weights that are cut in another way, and routing weights with NaN or infinity, naming the layer and the rank. Backward throws with
// create_graph: gradients have no gradients here.
//
// `beside`, work of the caller that needs no result of this, is called once: by alltoall and deduplicated while rows are on their way to
// experts, and else at the end. Backward, what it recorded runs while the rows' gradients are on their way back.
at::Tensor mix_experts(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights, const expert::Weights& w,
                       const MixOptions& options = {}, const expert::Beside& beside = [] {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace expert {

inline void check_sizes(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights, const Weights& w) {
  const auto str = [](const at::Tensor& tensor) { return detail::str_of(tensor.sizes()); };
  const auto &first = w.w1, &second = w.w2;
  const bool together = first.dim() == 3 && second.dim() == 3 && first.size(0) == second.size(0) && first.size(1) == second.size(2) &&
                        first.size(2) == second.size(1) && (!w.w3.defined() || w.w3.sizes() == first.sizes());
  require(together, "mix_experts",
          "the weights do not fit together; got w1 {}, w2 {} and w3 {}; expected [experts, hidden, dim], [experts, dim, hidden] and as w1",
          str(first), str(second), w.w3.defined() ? str(w.w3) : "none");
  const bool fits = x.dim() >= 2 && experts.dim() == x.dim() && experts.sizes() == weights.sizes() && experts.size(-1) > 0 &&
                    x.sizes().slice(0, x.dim() - 1) == experts.sizes().slice(0, x.dim() - 1) && x.size(-1) == first.size(2);
  require(fits, "mix_experts",
          "the tokens do not fit; got x {}, experts {} and weights {}, for weights w1 {}; expected [..., dim] and [..., k]", str(x),
          str(experts), str(weights), str(first));
  require(experts.scalar_type() == at::kLong && weights.is_floating_point(), "mix_experts",
          "experts are numbered by int64 and weights are floating; got {} and {}", c10::toString(experts.scalar_type()),
          c10::toString(weights.scalar_type()));
}

inline at::Tensor by_token(const at::Tensor& x) {
  return x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

inline bool is_exact(const MixOptions& options) { return wire(options.rows).name == "exact" && wire(options.results).name == "exact"; }

inline void check_options(const MixOptions& options) {
  check_dispatch(options.dispatch);
  require(is_exact(options) || options.dispatch != "allgather", "mix_experts",
          "allgather sends all numbers as they are; got rows {} and results {}; hint: .dispatch alltoall or deduplicated", options.rows,
          options.results);
  require(options.tiles >= 1 && (options.tiles == 1 || options.dispatch == "alltoall" || options.dispatch == "deduplicated"), "mix_experts",
          "tokens travel in one tile, or by alltoall or deduplicated in more; got {} tiles and {}", options.tiles, options.dispatch);
  require(!options.put || options.dispatch == "alltoall", "mix_experts",
          "rows are put into the memory of other ranks by alltoall; got {}; hint: leave .put out", options.dispatch);
}

inline bool is_finite(const at::Tensor& weights, const MixOptions& options) {
  return !options.error_if_nonfinite || weights.is_meta() || at::isfinite(weights).all().item<bool>();
}

// On one rank: of `chosen`, which are among `all` experts, those that this rank has.
inline at::Tensor mix_here(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const Weights& w, Interval own,
                           int64_t all, const MixOptions& options) {
  require(is_finite(weights, options), "mix_experts",
          "{}: the routing is not finite on this rank; hint: its logits or x hold NaN or infinity", options.layer);
  auto here = by_token(chosen);
  if (own.length() < all) here = at::where(here.ge(own.begin).logical_and(here.lt(own.end)), here.sub(own.begin), -1);
  const auto rows = here.is_meta() ? even_rows(here, own.length(), here.numel() * own.length() / all) : sorted_rows(here, own.length());
  const auto computed = feed_forward(take_rows(by_token(x), rows), rows.counts, w);
  return weighted_sums(computed, by_token(weights), rows).view(x.sizes());
}

inline MixOptions unchecked(MixOptions options) {
  options.error_if_nonfinite = false;
  return options;
}

// On one rank of a group: each token once to each rank that has any of its experts, in tiles as mix_in_tiles.
inline at::Tensor mix_deduplicated(const Group& group, const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights,
                                   const Weights& w, const MixOptions& options, const Beside& beside) {
  const auto [groups, lengths] = tiles_of(group, x.size(0), options.tiles);
  const auto tokens = x.split_with_sizes(lengths), choices = chosen.split_with_sizes(lengths), factors = weights.split_with_sizes(lengths);
  const bool finite = is_finite(weights, options);
  std::vector<TokenExchange> exchanges;
  for (int64_t i = 0; i < options.tiles; ++i) exchanges.emplace_back(groups[i], choices[i], finite, options.layer);
  std::vector<RowsUnderWay> rows, weighed, back;
  for (int64_t i = 0; i < options.tiles; ++i) {
    rows.push_back(exchanges[i].start_to_experts(tokens[i], wire(options.rows)));
    weighed.push_back(exchanges[i].start_to_experts(factors[i]));
  }
  beside();
  for (int64_t i = 0; i < options.tiles; ++i) {
    const auto arrived = exchanges[i].at_experts(rows[i]), with = exchanges[i].at_experts(weighed[i]);
    const auto computed = mix_here(arrived, exchanges[i].chosen(), with, w, {0, w.w1.size(0)}, w.w1.size(0), unchecked(options));
    back.push_back(exchanges[i].start_to_tokens(computed, wire(options.results)));
  }
  std::vector<at::Tensor> results;
  for (int64_t i = 0; i < options.tiles; ++i) results.push_back(exchanges[i].at_tokens(back[i]));
  return at::cat(results);
}

// On one rank of a group, with its own tokens and its own experts.
inline at::Tensor mix_among(const Group& group, const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const Weights& w,
                            const MixOptions& options, const Beside& beside) {
  if (options.dispatch == "deduplicated") {
    return mix_deduplicated(group, by_token(x), by_token(chosen), by_token(weights), w, options, beside).view(x.sizes());
  }
  auto* mailbox = options.put ? Mailbox::of(group.mesh) : nullptr;
  if (options.tiles > 1) {
    return mix_in_tiles(group, by_token(x), by_token(chosen), by_token(weights), w, options.tiles, is_finite(weights, options),
                        options.layer, wire(options.rows), wire(options.results), mailbox, beside).view(x.sizes());
  }
  const auto rows = sorted_rows(by_token(chosen), group.first_expert.back());
  const Exchange exchange(group, rows, is_finite(weights, options), options.layer, mailbox);
  const auto under_way = exchange.start_to_experts(by_token(x), rows, wire(options.rows));
  beside();
  const auto computed = feed_forward(exchange.at_experts(under_way), exchange.counts(), w);
  const auto back = exchange.start_to_tokens(computed, wire(options.results));
  return weighted_sums(back.arrive(), by_token(weights), rows).view(x.sizes());
}

// Of plain tensors any.
inline std::string automatic_dispatch(const at::Tensor& x, const at::Tensor& experts, const Weights& w, const MixOptions& options) {
  const auto* layout = find_layout(w.w1);
  if (!layout) return dispatches()[0];
  const auto known = plan_for(x, w.w1, dispatches()[0], "");
  const auto& plan = *known;
  const auto* of_x = find_layout(x);
  DispatchShape shape{.tokens = x.numel() / std::max<int64_t>(x.size(-1), 1), .dim = x.size(-1),
                      .k = options.mean_choices > 0 ? options.mean_choices : experts.size(-1), .experts = w.w1.size(0),
                      .element_size = static_cast<int64_t>(x.element_size()), .whole = true,
                      .experts_choose = options.mean_choices > 0};
  std::vector<CommCost> links;
  for (const auto m : plan.expert_dims) {
    shape.ranks *= plan.mesh.size(m);
    shape.whole &= !of_x || of_x->placements()[m].is_replicate();
    links.push_back(comm_cost(plan.mesh, m));
  }
  for (int64_t m = 0; m < plan.mesh.ndim(); ++m) {
    if (plan.tokens[m].is_shard()) shape.tokens = (shape.tokens + plan.mesh.size(m) - 1) / plan.mesh.size(m);
  }
  const auto cheapest = links.empty() ? dispatches()[0] : cheapest_dispatch(shape, links);
  return is_exact(options) || cheapest != "allgather" ? cheapest : dispatches()[0];
}

// Where x lay, as far as that is a layout of the result.
inline Placements as_before(const at::Tensor& x, const Plan& plan) {
  auto placements = plan.out;
  const auto* layout = find_layout(x);
  for (size_t m = 0; m < placements.size(); ++m) {
    const auto now = layout ? layout->placements()[m] : replicate();
    placements[m] = now.is_shard() ? now : replicate();
  }
  return placements;
}

// A weight of a fully sharded unit, gathered. Its gradient stays a pending sum, which the unit reduces with its others.
inline at::Tensor gathered(const at::Tensor& weight, const Placements& placements) {
  const auto* layout = weight.defined() ? find_layout(weight) : nullptr;
  if (!layout || !layout->is_flat()) return weight;
  return detail::linear_map({redistribute(weight.detach(), placements)}, {weight}, [](const TensorVector& g) { return g; })[0];
}

inline at::Tensor mix_on_mesh(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights, const Weights& w,
                              const MixOptions& options, const Beside& beside) {
  const auto known = plan_for(x, w.w1, options.dispatch, options.layer);
  const auto& plan = *known;
  const auto outside = c10::impl::tls_local_dispatch_key_set();
  const Beside beside_outside = [&] {  // of local_map, where tensors are distributed
    const c10::impl::ForceDispatchKeyGuard guard(outside);
    beside();
  };
  const auto mix = [&](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
    const Weights local{in[3], in[4], in.size() > 5 ? in[5] : at::Tensor()};
    if (plan.group) return {mix_among(*plan.group, in[0], in[1], in[2], local, options, beside_outside)};
    return {mix_here(in[0], in[1], in[2], local, plan.own, w.w1.size(0), options)};
  };
  std::vector<at::Tensor> inputs{x, experts, weights, gathered(w.w1, plan.w1), gathered(w.w2, plan.w2)};
  std::vector<Placements> in{plan.tokens, plan.tokens, plan.tokens, plan.w1, plan.w2};
  if (w.w3.defined()) inputs.push_back(gathered(w.w3, plan.w1)), in.push_back(plan.w1);
  const auto result = dtensor::detail::run_local_map(mix, plan.mesh, in, {plan.out}, {.out_sizes = {x.sizes().vec()}}, inputs)[0];
  if (!plan.group) beside();
  return redistribute(result, as_before(x, plan));
}

}  // namespace expert

inline at::Tensor mix_experts(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights, const expert::Weights& w,
                              const MixOptions& options, const expert::Beside& beside) {
  expert::check_sizes(x, experts, weights, w);
  expert::check_options(options);
  auto named = options;
  if (named.dispatch == "automatic") named.dispatch = expert::automatic_dispatch(x, experts, w, options);
  if (named.layer.empty() && is_dtensor(w.w1)) named.layer = module_name(w.w1);
  if (named.layer.empty()) named.layer = "a layer without a name";
  if (is_dtensor(x) || is_dtensor(w.w1)) return expert::mix_on_mesh(x, experts, weights, w, named, beside);
  auto result = expert::mix_here(x, experts, weights, w, {0, w.w1.size(0)}, w.w1.size(0), named);
  beside();
  return result;
}

}  // namespace dtensor

#pragma GCC visibility pop
