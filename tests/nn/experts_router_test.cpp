// Routers, capacities and losses of experts on one device, against formulas written token by token.
#include "tests/support/core_support.hpp"

#include <dtensor/nn/moe_capacity.hpp>
#include <dtensor/nn/moe_losses.hpp>
#include <dtensor/nn/moe_router.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <numeric>

namespace dtensor::test::experts {

namespace {

using Numbers = std::vector<double>;

Numbers numbers(const at::Tensor& x) {
  const auto flat = x.detach().to(torch::kDouble).reshape({-1}).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

std::vector<int64_t> indices_of(const at::Tensor& x) {
  const auto flat = x.reshape({-1}).contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

// The indices of the `count` largest, lower ones first among equals.
std::vector<int64_t> best(const Numbers& x, int64_t count) {
  std::vector<int64_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return x[a] > x[b]; });
  order.resize(count);
  return order;
}

// One token: its experts and their weights.
std::pair<std::vector<int64_t>, Numbers> route_one(const Numbers& logits, const nn::RouterOptions& o, const Numbers& bias) {
  const auto n = logits.size();
  Numbers scores, choice;
  double sum = 0;
  for (const auto z : logits) sum += std::exp(z);
  for (const auto z : logits) scores.push_back(o.scores == "softmax" ? std::exp(z) / sum : 1 / (1 + std::exp(-z)));
  for (size_t e = 0; e < n; ++e) choice.push_back(scores[e] + bias[e]);
  const auto each = n / o.groups;
  Numbers goodness;
  for (int64_t g = 0; g < o.groups; ++g) {
    const Numbers group(choice.begin() + g * each, choice.begin() + (g + 1) * each);
    double sum_of_best = 0;
    for (const auto i : best(group, std::min<int64_t>(o.of_group, each))) sum_of_best += group[i];
    goodness.push_back(sum_of_best);
  }
  const auto groups = best(goodness, o.top_groups);
  for (size_t e = 0; e < n; ++e) {
    if (std::ranges::find(groups, static_cast<int64_t>(e / each)) == groups.end()) choice[e] = -std::numeric_limits<double>::infinity();
  }
  const auto experts = best(choice, o.top_k);
  Numbers weights;
  for (const auto e : experts) weights.push_back(scores[e]);
  const auto total = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (auto& weight : weights) weight *= o.scale / (o.normalize ? total : 1);
  return {experts, weights};
}

}  // namespace

TEST_CASE("router: choices and weights are those of each token by itself", "[experts]") {
  torch::manual_seed(2);
  const auto logits = torch::randn({3, 5, 12}, torch::kDouble), bias = torch::randn({12}, torch::kDouble) * 0.2;
  for (const auto& o : std::vector<nn::RouterOptions>{{},
                                                      {.top_k = 3, .scores = "sigmoid", .scale = 2.5},
                                                      {.top_k = 4, .normalize = false},
                                                      {.top_k = 12},
                                                      {.top_k = 3, .scores = "sigmoid", .groups = 4, .top_groups = 2},
                                                      {.top_k = 2, .groups = 6, .top_groups = 3, .of_group = 1},
                                                      {.top_k = 2, .groups = 12, .top_groups = 2, .of_group = 5}}) {
    for (const bool biased : {false, true}) {
      CAPTURE(o.top_k, o.scores, o.groups, biased);
      const auto routing = nn::route(logits, o, biased ? bias : at::Tensor());
      for (int64_t t = 0; t < 15; ++t) {
        const auto [experts, weights] = route_one(numbers(logits.view({15, 12})[t]), o, biased ? numbers(bias) : Numbers(12, 0.0));
        REQUIRE(indices_of(routing.experts.reshape({15, -1})[t]) == experts);
        const auto got = numbers(routing.weights.reshape({15, -1})[t]);
        for (size_t j = 0; j < weights.size(); ++j) REQUIRE(got[j] == Approx(weights[j]).epsilon(1e-13));
      }
    }
  }
}

TEST_CASE("router: of equal scores the lower number is chosen", "[experts]") {
  const auto equal = nn::route(torch::zeros({2, 8}), {.top_k = 3});
  REQUIRE(indices_of(equal.experts) == std::vector<int64_t>{0, 1, 2, 0, 1, 2});
  auto logits = torch::zeros({1, 8});
  logits[0][6] = 1;
  REQUIRE(indices_of(nn::route(logits, {.top_k = 3}).experts) == std::vector<int64_t>{6, 0, 1});
}

TEST_CASE("router: a bias chooses and has no share in the weights", "[experts]") {
  torch::manual_seed(1);
  const auto logits = torch::randn({4, 6}, torch::kDouble).requires_grad_();
  auto bias = torch::zeros({6}, torch::kDouble);
  bias[5] = 100;
  const auto routing = nn::route(logits, {.top_k = 1, .normalize = false}, bias);
  REQUIRE(routing.experts.eq(5).all().item<bool>());
  REQUIRE(routing.weights.squeeze(-1).equal(logits.softmax(-1).select(1, 5)));
  REQUIRE_FALSE(bias.requires_grad());
}

TEST_CASE("router: with one choice that is not normalized it still learns", "[experts]") {
  nn::Router router(4, 3, nn::RouterOptions{.top_k = 1, .normalize = false});
  torch::manual_seed(3);
  router(torch::randn({5, 4})).weights.sum().backward();
  REQUIRE(router->weight.grad().abs().sum().item<double>() > 0);
}

TEST_CASE("router: scores are in float32 at least whatever the model is in", "[experts]") {
  nn::Router router(4, 3, nn::RouterOptions{});
  router->to(torch::kBFloat16);
  REQUIRE(router(torch::randn({5, 4}).to(torch::kBFloat16)).scores.scalar_type() == torch::kFloat);
  nn::Router exact(4, 3, nn::RouterOptions{.dtype = torch::kDouble});
  REQUIRE(exact(torch::randn({5, 4})).weights.scalar_type() == torch::kDouble);
}

TEST_CASE("router: sinkhorn evens out what scores do not", "[experts]") {
  torch::manual_seed(6);
  const auto logits = torch::randn({64, 4}, torch::kDouble) + torch::tensor({2., 0., 0., -2.}, torch::kDouble);
  const auto busiest = [&](const std::string& by) {
    const auto routing = nn::route(logits, {.top_k = 1, .choose_by = by, .sinkhorn_rounds = 50});
    REQUIRE(routing.weights.reshape({-1}).equal(torch::ones({64}, torch::kDouble)));
    return nn::tokens_per_expert(routing.experts, routing.scores).max().item<int64_t>();
  };
  REQUIRE(busiest("scores") > 40);
  REQUIRE(busiest("sinkhorn") < 24);
  const auto evened = nn::detail::evened(logits, 50);
  REQUIRE((evened.sum(0) - 0.25).abs().max().item<double>() < 1e-12);
  REQUIRE((evened.sum(1) - 1.0 / 64).abs().max().item<double>() < 1e-6);
}

TEST_CASE("router: in turns all experts are equally busy", "[experts]") {
  const auto routing = nn::route(torch::randn({3, 4, 6}), {.top_k = 2, .normalize = false, .choose_by = "turns"});
  REQUIRE(indices_of(nn::tokens_per_expert(routing.experts, routing.scores)) == std::vector<int64_t>(6, 4));
  REQUIRE(indices_of(routing.experts.view({12, 2})[2]) == std::vector<int64_t>{4, 5});
  REQUIRE(routing.weights.equal(routing.scores.gather(-1, routing.experts)));
}

TEST_CASE("router: jitter is small and of training only", "[experts]") {
  torch::manual_seed(7);
  nn::Router router(4, 3, nn::RouterOptions{.jitter = 0.1}), plain(4, 3, nn::RouterOptions{});
  plain->weight.set_data(router->weight.data());
  const auto x = torch::randn({50, 4});
  const auto exact = plain(x).logits, noisy = router(x).logits;
  REQUIRE_FALSE(noisy.equal(exact));
  REQUIRE((noisy - exact).abs().max().item<double>() < 0.1 * torch::linear(x.abs(), plain->weight.abs()).max().item<double>());
  router->eval();
  REQUIRE(router(x).logits.equal(exact));
}

TEST_CASE("router: what cannot be is refused by name", "[experts]") {
  const auto logits = torch::zeros({2, 8});
  REQUIRE_THROWS_WITH(nn::route(logits, {.top_k = 9}), says("is to choose 9 experts among 8"));
  REQUIRE_THROWS_WITH(nn::route(logits, {.top_k = 0}), says("is to choose 0 experts"));
  REQUIRE_THROWS_WITH(nn::route(logits, {.top_k = 3, .groups = 4, .top_groups = 1}), says("is to choose 3 experts among 2"));
  REQUIRE_THROWS_WITH(nn::route(logits, {.groups = 3}), says("got 3 groups"));
  REQUIRE_THROWS_WITH(nn::route(logits, {.scores = "tanh"}), says("no scores called 'tanh'"));
  REQUIRE_THROWS_WITH(nn::route(logits, {.choose_by = "dice"}), says("no choice by 'dice'"));
  REQUIRE_THROWS_WITH(nn::route(logits, {.jitter = 1}), says("a jitter of 1"));
  REQUIRE_THROWS_WITH(nn::capacity_of(0, 8, 2, 4), says("capacity factor of 0"));
  REQUIRE_THROWS_WITH(nn::capacity_of(HUGE_VAL, 8, 2, 4), says("capacity factor of inf"));
  REQUIRE_THROWS_WITH(nn::limit_to_capacity(torch::zeros({2, 1}, torch::kLong), torch::ones({2, 1}), 4, 0), says("capacity of 0"));
  REQUIRE_THROWS_WITH(nn::limit_to_capacity(torch::zeros({2, 1}, torch::kLong), torch::ones({2, 1}), 4, 1, "random"), says("'random'"));
}

TEST_CASE("capacity: an expert keeps the first tokens or the most probable ones", "[experts]") {
  const auto chosen = torch::tensor({0, 1, 0, 2, 0, 1, 1, 0}, torch::kLong).view({4, 2});
  const auto weights = torch::tensor({.1, .9, .4, .6, .4, .6, .3, .7}, torch::kDouble).view({4, 2});
  REQUIRE(indices_of(nn::limit_to_capacity(chosen, weights, 3, 2)) == std::vector<int64_t>{0, 1, 0, 2, -1, 1, -1, -1});
  REQUIRE(indices_of(nn::limit_to_capacity(chosen, weights, 3, 2, "probability")) == std::vector<int64_t>{-1, 1, 0, 2, -1, 1, -1, 0});
  REQUIRE(indices_of(nn::limit_to_capacity(chosen, weights, 3, 4)) == indices_of(chosen));
  REQUIRE(nn::capacity_of(1, 4, 2, 3) == 3);
  REQUIRE(nn::capacity_of(1.5, 4, 2, 3) == 4);
  REQUIRE(nn::capacity_of(1e300, 4, 2, 3) == 8);  // all rows that there are
}

TEST_CASE("losses of experts are their formulas", "[experts]") {
  torch::manual_seed(4);
  const auto logits = torch::randn({2, 3, 4}, torch::kDouble);
  const auto routing = nn::route(logits, {.top_k = 2, .scores = "sigmoid"});
  const auto scores = numbers(routing.scores);
  const auto chosen = indices_of(routing.experts);
  const auto loss_of = [&](int64_t first, int64_t count) {
    Numbers f(4, 0.0), p(4, 0.0);
    for (int64_t t = first; t < first + count; ++t) {
      double sum = 0;
      for (int64_t e = 0; e < 4; ++e) sum += scores[t * 4 + e];
      for (int64_t e = 0; e < 4; ++e) p[e] += scores[t * 4 + e] / sum / static_cast<double>(count);
      for (int64_t j = 0; j < 2; ++j) f[chosen[t * 2 + j]] += 1.0 / static_cast<double>(2 * count);
    }
    double loss = 0;
    for (int64_t e = 0; e < 4; ++e) loss += 4 * f[e] * p[e];
    return loss;
  };
  const auto of_batch = nn::balance_loss(routing.scores, nn::tokens_per_expert(routing.experts, routing.scores));
  REQUIRE(of_batch.item<double>() == Approx(loss_of(0, 6)).epsilon(1e-13));
  const auto of_sequences = nn::balance_loss(routing.scores, nn::tokens_per_expert(routing.experts, routing.scores, true));
  REQUIRE(of_sequences.item<double>() == Approx((loss_of(0, 3) + loss_of(3, 3)) / 2).epsilon(1e-13));
  double z = 0;
  for (int64_t t = 0; t < 6; ++t) {
    double sum = 0;
    for (const auto logit : numbers(logits.view({6, 4})[t])) sum += std::exp(logit);
    z += std::log(sum) * std::log(sum) / 6;
  }
  REQUIRE(nn::z_loss(logits).item<double>() == Approx(z).epsilon(1e-13));
}

TEST_CASE("losses of experts reach the gradients through the layer that has them", "[experts]") {
  const auto x = torch::ones({3}, torch::kDouble).requires_grad_(), z = torch::full({}, 2.0, torch::kDouble).requires_grad_();
  const auto y = nn::with_loss(x * 2, z * z, 0.5);
  REQUIRE(y.equal(x.detach() * 2));
  y.sum().backward();
  REQUIRE(x.grad().equal(torch::full({3}, 2.0, torch::kDouble)));
  REQUIRE(z.grad().item<double>() == 0.5 * 2 * 2);
}

}  // namespace dtensor::test::experts
