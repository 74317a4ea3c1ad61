// Which experts a token goes to, and what their results weigh.
#pragma once

#include <dtensor/nn/moe_choices.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::nn {

struct RouterOptions {
  int64_t top_k = 2;
  std::string scores = "softmax";  // of the logits; or sigmoid (DeepSeek-V3)
  bool normalize = true;           // a token's weights add up to 1. With softmax that is the softmax of the chosen logits (Mixtral)
  double scale = 1;                // of the weights, after that
  // Experts lie in so many groups of equal size, and a token chooses within the best `top_groups` of them (DeepSeek-V2 and V3: groups are
  // nodes). A group is as good as the sum of its `of_group` best experts.
  int64_t groups = 1, top_groups = 1, of_group = 2;
  at::ScalarType dtype = at::kFloat;  // of logits and scores, at least
  // What a token chooses by; its weights are its scores in any case.
  //   scores     its own
  //   sinkhorn   logits that were made even over all tokens of the batch, in so many rounds (Clark et al., "Unified Scaling Laws for Routed
  //              Language Models", 2022)
  //   turns      nothing: token t takes experts t k, t k + 1, ... in turn. All are equally busy, to measure with
  //   experts    experts choose: each takes the ceil(tokens k / experts) tokens of the global batch with the largest scores. A token may
  //              have none or many, so Routing::experts has a column for each expert: see chosen_by_experts
  //   hash       its number in the vocabulary: see chosen_by_hash
  std::string choose_by = "scores";
  int64_t sinkhorn_rounds = 8;
  double jitter = 0;  // in training, inputs are multiplied by random numbers from 1 - jitter to 1 + jitter (Fedus et al., 2021)
};

struct Routing {
  at::Tensor logits, scores;    // [..., experts]
  at::Tensor experts, weights;  // int64 and floating [..., k], the best first; -1: none, with a weight of 0
};

// From logits [..., experts]. `bias` [experts] is added to what experts are chosen by, and has no share in the weights (Wang et al.,
// "Auxiliary-Loss-Free Load Balancing", 2024). Of equal ones the lower number is chosen, on any device and mesh. Communicates nothing where
// tokens are cut, but for sinkhorn an all_reduce a round, and where experts choose the scores of all tokens. `ids` int64 [...], the tokens'
// numbers in the vocabulary, are for choice by hash alone. Throws for more choices than experts (of the groups that are chosen), groups
// that do not divide the experts, and options that there are not.
Routing route(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias = {}, const at::Tensor& ids = {});

class RouterImpl : public torch::nn::Module {
 public:
  RouterImpl(int64_t dim, int64_t experts, const RouterOptions& options);
  // x [..., dim]; see route.
  Routing forward(const torch::Tensor& x, const torch::Tensor& bias = {}, const torch::Tensor& ids = {});

  torch::Tensor weight;  // [experts, dim]

 private:
  RouterOptions options_;
};
TORCH_MODULE(Router);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// [..., out, in], drawn as torch::nn::Linear draws it.
inline torch::Tensor linear_weight(c10::IntArrayRef sizes) {
  const double bound = 1 / std::sqrt(static_cast<double>(sizes.back()));
  return torch::empty(sizes).uniform_(-bound, bound);
}

// The `count` largest along the last dim, the lower index first among equals.
inline at::Tensor largest(const at::Tensor& x, int64_t count) {
  return std::get<1>(at::sort(x, /*stable=*/true, /*dim=*/-1, /*descending=*/true)).narrow(-1, 0, count);
}

// `choice` without the experts of other groups than a token's best.
inline at::Tensor of_best_groups(const at::Tensor& choice, const RouterOptions& o) {
  if (o.top_groups == o.groups) return choice;
  auto sizes = choice.sizes().vec();
  const auto each = sizes.back() / o.groups;
  sizes.back() = o.groups, sizes.push_back(each);
  const auto grouped = choice.reshape(sizes);
  const auto falling = std::get<0>(at::sort(grouped, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  const auto goodness = falling.narrow(-1, 0, std::min(o.of_group, each)).sum(-1);
  const auto chosen = at::zeros_like(goodness).scatter(-1, largest(goodness, o.top_groups), 1);
  return grouped.masked_fill(chosen.unsqueeze(-1).eq(0), -std::numeric_limits<double>::infinity()).reshape(choice.sizes());
}

// exp(logits), scaled until all tokens have one sum, and all experts another.
inline at::Tensor evened(const at::Tensor& logits, int64_t rounds) {
  const auto experts = static_cast<double>(logits.size(-1)), tokens = static_cast<double>(logits.numel()) / experts;
  const auto costs = (logits - logits.amax(-1, /*keepdim=*/true)).exp().reshape({-1, logits.size(-1)});
  auto of_experts = at::ones_like(costs.select(0, 0));
  at::Tensor of_tokens;
  for (int64_t i = 0; i < rounds; ++i) {
    of_tokens = (costs * of_experts).sum(1, /*keepdim=*/true).reciprocal() / tokens;
    of_experts = (costs * of_tokens).sum(0).reciprocal() / experts;
  }
  return (costs * of_experts * of_tokens).reshape(logits.sizes());
}

struct Choosing {
  const at::Tensor &logits, &scores, &bias, &ids;
  const RouterOptions& options;
};

inline at::Tensor best_of(const at::Tensor& own, const Choosing& c) {
  return largest(of_best_groups(c.bias.defined() ? own + c.bias.to(own.scalar_type()) : own, c.options), c.options.top_k);
}

inline at::Tensor in_turn(const Choosing& c) {
  auto sizes = c.logits.sizes().vec();
  const auto experts = sizes.back();
  sizes.back() = c.options.top_k;
  const auto count = c10::multiply_integers(sizes);
  return at::arange(count, c.logits.options().dtype(at::kLong).requires_grad(false)).remainder(experts).view(sizes);
}

// In a dry run, which takes experts for equally busy, each token has k of them.
inline at::Tensor by_experts(const Choosing& c) {
  const auto experts = c.scores.size(-1), tokens = c.scores.numel() / experts;
  if (c.scores.is_meta()) return in_turn(c);
  return chosen_by_experts(c.scores, std::min(tokens, (tokens * c.options.top_k + experts - 1) / experts));
}

inline at::Tensor by_hash(const Choosing& c) {
  require(c.ids.defined() && c.ids.sizes() == c.logits.sizes().slice(0, c.logits.dim() - 1), "route",
          "a choice by hash needs the tokens' numbers, one for each row of logits; got {}; hint: pass them to the layer beside x",
          c.ids.defined() ? std::to_string(c.ids.numel()) : "none");
  return chosen_by_hash(c.ids, c.logits.size(-1), c.options.top_k);
}

struct ChoiceBy {
  std::string_view name;
  at::Tensor (*choose)(const Choosing&);  // int64 [..., k]
  bool by_tokens;                         // each takes its best of what groups leave
};
inline constexpr std::array<ChoiceBy, 5> kChoices{{
    {"scores", [](const Choosing& c) { return best_of(c.scores.detach(), c); }, true},
    {"sinkhorn", [](const Choosing& c) { return best_of(evened(c.logits.detach(), c.options.sinkhorn_rounds), c); }, true},
    {"turns", in_turn, false},
    {"experts", by_experts, false},
    {"hash", by_hash, false},
}};

inline const ChoiceBy& choice_by(std::string_view name) {
  const auto* found = std::ranges::find(kChoices, name, &ChoiceBy::name);
  require(found != kChoices.end(), "route", "there is no choice by '{}'; expected scores, sinkhorn, turns, experts or hash", name);
  return *found;
}

inline void check_router(const RouterOptions& o, int64_t experts) {
  require(o.scores == "softmax" || o.scores == "sigmoid", "route", "there are no scores called '{}'; expected softmax or sigmoid",
          o.scores);
  require(o.groups >= 1 && experts % o.groups == 0 && o.top_groups >= 1 && o.top_groups <= o.groups, "route",
          "got {} groups of which {} are chosen, for {} experts; expected a divisor of the experts, and no more than there are", o.groups,
          o.top_groups, experts);
  const auto among = experts / o.groups * o.top_groups;
  require(o.top_k >= 1 && o.top_k <= among, "route", "a token is to choose {} experts among {}; expected 1 or more, and no more than that",
          o.top_k, among);
  const bool by_tokens = choice_by(o.choose_by).by_tokens;
  require(by_tokens || o.top_groups == o.groups, "route", "groups limit what a token chooses by scores or sinkhorn; got them with {}",
          o.choose_by);
  require(o.sinkhorn_rounds >= 1 && o.jitter >= 0 && o.jitter < 1, "route",
          "got {} rounds of sinkhorn and a jitter of {}; expected 1 or more, and 0 to below 1", o.sinkhorn_rounds, o.jitter);
  require(o.of_group >= 1, "route", "a group is as good as its best {} experts; expected 1 or more", o.of_group);
}

}  // namespace detail

inline Routing route(const at::Tensor& logits, const RouterOptions& o, const at::Tensor& bias, const at::Tensor& ids) {
  detail::check_router(o, logits.size(-1));
  const auto scores = o.scores == "softmax" ? logits.softmax(-1) : logits.sigmoid();
  const auto experts = detail::choice_by(o.choose_by).choose({logits, scores, bias, ids, o});
  const bool any_number = o.choose_by == "experts" && !logits.is_meta();  // of choices: one expert a column, or none
  auto weights = any_number ? scores.masked_fill(experts.lt(0), 0) : scores.gather(-1, experts);
  if (o.normalize) weights = weights / (weights.sum(-1, /*keepdim=*/true) + 1e-20);
  if (o.scale != 1) weights = weights * o.scale;
  return {logits, scores, experts, weights};
}

inline RouterImpl::RouterImpl(int64_t dim, int64_t experts, const RouterOptions& options) : options_(options) {
  detail::check_router(options, experts);
  weight = register_parameter("weight", detail::linear_weight({experts, dim}));
}

inline Routing RouterImpl::forward(const torch::Tensor& x, const torch::Tensor& bias, const torch::Tensor& ids) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = c10::promoteTypes(x.scalar_type(), options_.dtype);
  auto input = x.to(dtype);
  if (options_.jitter > 0 && is_training()) input = input * (1 + options_.jitter * (at::rand_like(input) * 2 - 1));
  return route(at::linear(input, weight.to(dtype)), options_, bias, ids);
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
