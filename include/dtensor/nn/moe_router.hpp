// Which experts a token goes to, and what their results weigh.
#pragma once

#include <dtensor/base/error.hpp>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

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
};

struct Routing {
  at::Tensor logits, scores;    // [..., experts]
  at::Tensor experts, weights;  // int64 and floating [..., k], the best first
};

// From logits [..., experts]. `bias` [experts] is added to the scores for the choice alone, not for the weights (Wang et al., "Auxiliary-
// Loss-Free Load Balancing", 2024). Of equal scores the lower number is chosen, on any device and mesh. Communicates nothing where tokens
// are cut. Throws for more choices than experts (of the groups that are chosen), and groups that do not divide the experts.
Routing route(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias = {});

class RouterImpl : public torch::nn::Module {
 public:
  RouterImpl(int64_t dim, int64_t experts, const RouterOptions& options);
  // x [..., dim].
  Routing forward(const torch::Tensor& x, const torch::Tensor& bias = {});

  torch::Tensor weight;  // [experts, dim]

 private:
  RouterOptions options_;
};
TORCH_MODULE(Router);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline void check_router(const RouterOptions& o, int64_t experts) {
  require(o.scores == "softmax" || o.scores == "sigmoid", "route", "there are no scores called '{}'; expected softmax or sigmoid",
          o.scores);
  require(o.groups >= 1 && experts % o.groups == 0 && o.top_groups >= 1 && o.top_groups <= o.groups, "route",
          "got {} groups of which {} are chosen, for {} experts; expected a divisor of the experts, and no more than there are", o.groups,
          o.top_groups, experts);
  const auto among = experts / o.groups * o.top_groups;
  require(o.top_k >= 1 && o.top_k <= among, "route", "a token is to choose {} experts among {}; expected 1 or more, and no more than that",
          o.top_k, among);
  require(o.of_group >= 1, "route", "a group is as good as its best {} experts; expected 1 or more", o.of_group);
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

}  // namespace detail

inline Routing route(const at::Tensor& logits, const RouterOptions& o, const at::Tensor& bias) {
  detail::check_router(o, logits.size(-1));
  const auto scores = o.scores == "softmax" ? logits.softmax(-1) : logits.sigmoid();
  const auto choice = bias.defined() ? scores.detach() + bias.to(scores.scalar_type()) : scores.detach();
  const auto experts = detail::largest(detail::of_best_groups(choice, o), o.top_k);
  auto weights = scores.gather(-1, experts);
  if (o.normalize) weights = weights / (weights.sum(-1, /*keepdim=*/true) + 1e-20);
  if (o.scale != 1) weights = weights * o.scale;
  return {logits, scores, experts, weights};
}

inline RouterImpl::RouterImpl(int64_t dim, int64_t experts, const RouterOptions& options) : options_(options) {
  detail::check_router(options, experts);
  weight = register_parameter("weight", torch::empty({experts, dim}));
  const double bound = 1 / std::sqrt(static_cast<double>(dim));
  torch::NoGradGuard no_grad;
  weight.uniform_(-bound, bound);  // as torch::nn::Linear
}

inline Routing RouterImpl::forward(const torch::Tensor& x, const torch::Tensor& bias) {
  const auto dtype = c10::promoteTypes(x.scalar_type(), options_.dtype);
  return route(at::linear(x.to(dtype), weight.to(dtype)), options_, bias);
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
