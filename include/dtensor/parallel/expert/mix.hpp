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
  std::string layer = "";  // its name in errors; empty: that of the weights' module
  bool error_if_nonfinite = true;
  // What rows are while they travel to experts, and results on their way back, by alltoall and deduplicated; gradients of each as they
  // were: exact, bfloat16, or blocks8, a byte a number and a scale for 128 of them (expert::Wire has the errors).
  std::string rows = "exact", results = "exact";
  // By alltoall: so many parts of each rank's tokens, of which one is computed while others travel. It pays where rows wait for a network.
  // Experts multiply fewer rows at once, and gradients are added in another order.
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
// reduce_scatter, and as many in backward. Throws for sizes that do not fit, an expert that there is not, weights that are cut in another
// way, and routing weights with NaN or infinity, naming the layer and the rank.
at::Tensor mix_experts(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights, const expert::Weights& w,
                       const MixOptions& options = {});

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
  require(options.tiles >= 1 && (options.tiles == 1 || options.dispatch == "alltoall"), "mix_experts",
          "tokens travel in one tile, or by alltoall in more; got {} tiles and {}", options.tiles, options.dispatch);
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

// On one rank of a group, with its own tokens and its own experts.
inline at::Tensor mix_among(const Group& group, const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const Weights& w,
                            const MixOptions& options) {
  if (options.dispatch == "deduplicated") {
    const TokenExchange exchange(group, by_token(chosen), is_finite(weights, options), options.layer);
    const auto arrived = exchange.to_experts(by_token(x), wire(options.rows)), factors = exchange.to_experts(by_token(weights));
    const auto computed = mix_here(arrived, exchange.chosen(), factors, w, {0, w.w1.size(0)}, w.w1.size(0), unchecked(options));
    return exchange.to_tokens(computed, wire(options.results)).view(x.sizes());
  }
  auto* mailbox = options.put ? Mailbox::of(group.mesh) : nullptr;
  if (options.tiles > 1) {
    return mix_in_tiles(group, by_token(x), by_token(chosen), by_token(weights), w, options.tiles, is_finite(weights, options),
                        options.layer, wire(options.rows), wire(options.results), mailbox).view(x.sizes());
  }
  const auto rows = sorted_rows(by_token(chosen), group.first_expert.back());
  const Exchange exchange(group, rows, is_finite(weights, options), options.layer, mailbox);
  const auto arrived = exchange.to_experts(by_token(x), rows, wire(options.rows));
  const auto computed = feed_forward(arrived, exchange.counts(), w);
  return weighted_sums(exchange.to_tokens(computed, wire(options.results)), by_token(weights), rows).view(x.sizes());
}

// Of plain tensors any.
inline std::string automatic_dispatch(const at::Tensor& x, const at::Tensor& experts, const Weights& w, bool may_gather) {
  const auto* layout = find_layout(w.w1);
  if (!layout) return dispatches()[0];
  const auto known = plan_for(x, w.w1, dispatches()[0], "");
  const auto& plan = *known;
  const auto* of_x = find_layout(x);
  DispatchShape shape{.tokens = x.numel() / std::max<int64_t>(x.size(-1), 1), .dim = x.size(-1), .k = experts.size(-1),
                      .experts = w.w1.size(0), .element_size = static_cast<int64_t>(x.element_size()), .whole = true};
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
  return may_gather || cheapest != "allgather" ? cheapest : dispatches()[0];
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
                              const MixOptions& options) {
  const auto known = plan_for(x, w.w1, options.dispatch, options.layer);
  const auto& plan = *known;
  const auto mix = [&](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
    const Weights local{in[3], in[4], in.size() > 5 ? in[5] : at::Tensor()};
    if (plan.group) return {mix_among(*plan.group, in[0], in[1], in[2], local, options)};
    return {mix_here(in[0], in[1], in[2], local, plan.own, w.w1.size(0), options)};
  };
  std::vector<at::Tensor> inputs{x, experts, weights, gathered(w.w1, plan.w1), gathered(w.w2, plan.w2)};
  std::vector<Placements> in{plan.tokens, plan.tokens, plan.tokens, plan.w1, plan.w2};
  if (w.w3.defined()) inputs.push_back(gathered(w.w3, plan.w1)), in.push_back(plan.w1);
  const auto result = dtensor::detail::run_local_map(mix, plan.mesh, in, {plan.out}, {.out_sizes = {x.sizes().vec()}}, inputs)[0];
  return redistribute(result, as_before(x, plan));
}

}  // namespace expert

inline at::Tensor mix_experts(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights, const expert::Weights& w,
                              const MixOptions& options) {
  expert::check_sizes(x, experts, weights, w);
  expert::check_options(options);
  auto named = options;
  if (named.dispatch == "automatic") named.dispatch = expert::automatic_dispatch(x, experts, w, expert::is_exact(options));
  if (named.layer.empty()) named.layer = is_dtensor(w.w1) ? module_name(w.w1) : "";
  if (!is_dtensor(x) && !is_dtensor(w.w1)) return expert::mix_here(x, experts, weights, w, {0, w.w1.size(0)}, w.w1.size(0), named);
  return expert::mix_on_mesh(x, experts, weights, w, named);
}

}  // namespace dtensor

#pragma GCC visibility pop
