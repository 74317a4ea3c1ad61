// Advantages against loops over plain numbers, on one device and on ranks.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/advantages.hpp>
#include <dtensor/rl/shaping.hpp>

#include <map>
#include <numeric>

using namespace dtensor;
using namespace dtensor::test;
using rl::LoneAnswer;

namespace {

struct Rows2 {
  RlRows advantages, returns;
};

// GAE as its definition: a sum over all later steps, instead of a recurrence. `steps` of a sequence with reward, value and decay of each.
double advantage_by_sum(const RlRow& rewards, const RlRow& values, size_t from, double gamma, double lambda) {
  double sum = 0, factor = 1;
  for (size_t k = from; k < rewards.size(); ++k, factor *= gamma * lambda) {
    sum += factor * (rewards[k] + (k + 1 < values.size() ? gamma * values[k + 1] : 0) - values[k]);
  }
  return sum;
}

Rows2 gae_by_sums(const RlRows& rewards, const RlRows& values, const RlRows& mask, const rl::GaeOptions& o) {
  Rows2 out{RlRows(mask.size(), RlRow(mask[0].size())), RlRows(mask.size(), RlRow(mask[0].size()))};
  for (size_t b = 0; b < mask.size(); ++b) {
    const auto tokens = rl_tokens_of(mask[b]);
    RlRow r, v;
    for (const auto t : tokens) {
      r.push_back(rewards[b][t]);
      v.push_back(values[b][t]);
    }
    const double lambda =
        o.length_alpha > 0 ? std::max(o.length_least_lambda, 1 - 1 / (o.length_alpha * static_cast<double>(r.size()))) : o.lambda;
    for (size_t k = 0; k < tokens.size(); ++k) {
      out.advantages[b][tokens[k]] = advantage_by_sum(r, v, k, o.gamma, lambda);
      out.returns[b][tokens[k]] = advantage_by_sum(r, v, k, o.gamma, o.critic_lambda.value_or(o.lambda)) + v[k];
    }
  }
  return out;
}

}  // namespace

TEST_CASE("rl advantages: GAE is the sum of its definition", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), values = rl_numbers({6, 7}, 2);
  const auto mask = rl_rows(rl_mask());
  for (const rl::GaeOptions& options :
       {rl::GaeOptions{}, rl::GaeOptions{.gamma = 0.9, .lambda = 0.8}, rl::GaeOptions{.gamma = 0.95, .lambda = 0.7, .critic_lambda = 1.0},
        rl::GaeOptions{.length_alpha = 0.4}, rl::GaeOptions{.gamma = 0.99, .critic_lambda = 0.5, .length_alpha = 0.25},
        rl::GaeOptions{.length_alpha = 0.4, .length_least_lambda = 0.6}, rl::GaeOptions{.gamma = 0, .lambda = 0}}) {
    auto plain = options;
    plain.whiten = false;
    const auto expected = gae_by_sums(rl_rows(rewards), rl_rows(values), mask, options);
    const auto got = rl::gae(rewards, values, rl_mask(), plain);
    CHECK_NOTHROW(rl_near(got.advantages, expected.advantages, "advantages"));
    CHECK_NOTHROW(rl_near(got.returns, expected.returns, "returns"));
    const auto whitened_got = rl::gae(rewards, values, rl_mask(), options);
    CHECK_NOTHROW(rl_near(whitened_got.advantages, rl_whitened(expected.advantages, mask), "whitened advantages"));
    CHECK_NOTHROW(rl_near(whitened_got.returns, expected.returns, "returns beside whitened advantages"));
  }
}

TEST_CASE("rl advantages: GAE of long sequences keeps its digits", "[rl]") {
  const auto rewards = rl_numbers({2, 777}, 1), values = rl_numbers({2, 777}, 2), mask = (rl_numbers({2, 777}, 3) > -0.6);
  const rl::GaeOptions options{.gamma = 0.999, .lambda = 0.98, .critic_lambda = 1.0, .whiten = false};
  const auto expected = gae_by_sums(rl_rows(rewards), rl_rows(values), rl_rows(mask), options);
  const auto got = rl::gae(rewards, values, mask, options);
  CHECK_NOTHROW(rl_near(got.advantages, expected.advantages, "advantages"));
  CHECK_NOTHROW(rl_near(got.returns, expected.returns, "returns"));
  const auto in_short = rl::gae(rewards.to(torch::kFloat), values.to(torch::kFloat), mask, options);
  CHECK(in_short.advantages.scalar_type() == torch::kFloat);
  CHECK_NOTHROW(rl_near(in_short.returns, expected.returns, "returns in float32", 1e-6));
}

TEST_CASE("rl advantages: rewards and values of masked tokens do not count", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), values = rl_numbers({6, 7}, 2);
  const auto nan = torch::full({}, std::nan(""), torch::kDouble);
  const auto spoiled_rewards = rewards.where(rl_mask().ne(0), nan), spoiled_values = values.where(rl_mask().ne(0), nan);
  CHECK(rl::gae(spoiled_rewards, spoiled_values, rl_mask()).advantages.equal(rl::gae(rewards, values, rl_mask()).advantages));
  CHECK(rl::turn_gae(spoiled_rewards, spoiled_values, rl_mask()).returns.equal(rl::turn_gae(rewards, values, rl_mask()).returns));
  CHECK(rl::remax(spoiled_rewards, rl_scores(), rl_mask()).advantages.equal(rl::remax(rewards, rl_scores(), rl_mask()).advantages));
}

TEST_CASE("rl advantages: turns are steps", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 4), values = rl_numbers({6, 7}, 5);
  const auto r = rl_rows(rewards), v = rl_rows(values), mask = rl_rows(rl_mask());
  // The last has two turns without a tool between, and the first three.
  const auto turns = torch::tensor({0, 0, 1, 1, 1, 9, 9, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 4, 4, 4, 4,
                                    0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2},
                                   torch::kLong)
                         .reshape({6, 7});
  for (const bool with_numbers : {false, true}) {
    const rl::GaeOptions options{.gamma = 0.9, .lambda = 0.7, .critic_lambda = 0.95, .whiten = false};
    const auto got = rl::turn_gae(rewards, values, rl_mask(), with_numbers ? turns : at::Tensor(), options);
    RlRows advantages(6, RlRow(7)), returns = advantages, starts = advantages;
    for (size_t b = 0; b < 6; ++b) {
      std::vector<std::vector<size_t>> all;  // tokens of each turn
      for (const auto t : rl_tokens_of(mask[b])) {
        const bool is_next = !all.empty() && all.back().back() + 1 == t;
        const bool goes_on = with_numbers ? !all.empty() && turns[b][all.back()[0]].equal(turns[b][t]) : is_next;
        if (!goes_on) all.emplace_back();
        all.back().push_back(t);
      }
      RlRow sums, firsts;
      for (const auto& turn : all) {
        sums.push_back(0);
        for (const auto t : turn) sums.back() += r[b][t];
        firsts.push_back(v[b][turn[0]]);
      }
      for (size_t k = 0; k < all.size(); ++k) {
        for (const auto t : all[k]) advantages[b][t] = advantage_by_sum(sums, firsts, k, 0.9, 0.7);
        returns[b][all[k][0]] = advantage_by_sum(sums, firsts, k, 0.9, 0.95) + firsts[k];
        starts[b][all[k][0]] = 1;
      }
    }
    CHECK_NOTHROW(rl_near(got.advantages, advantages, "advantages of turns"));
    CHECK_NOTHROW(rl_near(got.returns, returns, "returns of turns"));
    CHECK_NOTHROW(rl_near(got.value_mask, starts, "first tokens"));
  }
}

TEST_CASE("rl advantages: without a critic", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 6);
  const auto r = rl_rows(rewards), mask = rl_rows(rl_mask());
  RlRows discounted(6, RlRow(7)), sums = discounted, ahead_of_greedy = discounted;
  const auto greedy = rl_row(rl_scores());
  for (size_t b = 0; b < 6; ++b) {
    const auto tokens = rl_tokens_of(mask[b]);
    for (size_t i = 0; i < tokens.size(); ++i) {
      for (size_t j = i; j < tokens.size(); ++j) {
        discounted[b][tokens[i]] += std::pow(0.9, static_cast<double>(j - i)) * r[b][tokens[j]];
        sums[b][tokens[i]] += r[b][tokens[j]];
      }
      ahead_of_greedy[b][tokens[i]] = sums[b][tokens[i]] - greedy[b];
    }
  }
  const auto plus = rl::reinforce_plus_plus(rewards, rl_mask(), 0.9);
  CHECK_NOTHROW(rl_near(plus.returns, discounted, "returns"));
  CHECK_NOTHROW(rl_near(plus.advantages, rl_whitened(discounted, mask), "advantages"));
  const auto max = rl::remax(rewards, rl_scores(), rl_mask());
  CHECK_NOTHROW(rl_near(max.returns, sums, "ReMax's returns"));
  CHECK_NOTHROW(rl_near(max.advantages, ahead_of_greedy, "ReMax's advantages"));
}

TEST_CASE("rl advantages: scores stand at last tokens and are sums of rewards", "[rl]") {
  const auto rewards = rl::at_last_token(rl_scores(), rl_mask());
  RlRows expected(6, RlRow(7));
  const auto mask = rl_rows(rl_mask()), scores = RlRows{rl_row(rl_scores())};
  for (size_t b = 0; b < 6; ++b) {
    if (!rl_tokens_of(mask[b]).empty()) expected[b][rl_tokens_of(mask[b]).back()] = scores[0][b];
  }
  CHECK_NOTHROW(rl_near(rewards, expected, "rewards"));
  auto with_tokens = rl_scores();
  with_tokens[3] = 0;  // this answer is empty
  CHECK(rl::scores_of(rewards, rl_mask()).equal(with_tokens));
}

TEST_CASE("rl advantages: ranks have those of one device", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), values = rl_numbers({6, 7}, 2), logp = rl_numbers({6, 7}, 3, -2, -0.1);
  const auto scores = rl_scores(), groups = rl_group_numbers(), mask = rl_mask();
  const auto each = [](const rl::Advantages& a) { return std::vector<at::Tensor>{a.advantages, a.returns}; };
  CHECK_NOTHROW(rl_same_on_ranks("GAE", [&](const RlShared& on) {
    return each(rl::gae(on(rewards), on(values), on(mask), {.gamma = 0.9, .critic_lambda = 0.8, .length_alpha = 0.4}));
  }));
  CHECK_NOTHROW(rl_same_on_ranks("turns", [&](const RlShared& on) {
    const auto got = rl::turn_gae(on(rewards), on(values), on(mask), {}, {.gamma = 0.9, .lambda = 0.8});
    return std::vector<at::Tensor>{got.advantages, got.returns, got.value_mask};
  }));
  CHECK_NOTHROW(
      rl_same_on_ranks("REINFORCE++", [&](const RlShared& on) { return each(rl::reinforce_plus_plus(on(rewards), on(mask), 0.9)); }));
  CHECK_NOTHROW(rl_same_on_ranks("ReMax", [&](const RlShared& on) { return each(rl::remax(on(rewards), on(scores), on(mask))); }));
  CHECK_NOTHROW(rl_same_on_ranks("rewards", [&](const RlShared& on) {
    return std::vector<at::Tensor>{rl::at_last_token(on(scores), on(mask)), rl::scores_of(on(rewards), on(mask)).unsqueeze(1)};
  }));
}

TEST_CASE("rl advantages: what cannot work says so with its shapes", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), mask = rl_mask(), scores = rl_scores(), groups = rl_group_numbers();
  const auto with_nan = scores.clone();
  with_nan[3] = std::nan("");
  CHECK_NOTHROW(refuses("at index 3", [&] { rl::grpo(with_nan, groups, mask); }));
  CHECK_NOTHROW(refuses("a verifier's failure should score 0", [&] { rl::gae(rewards / 0, rewards, mask); }));
  CHECK_NOTHROW(refuses("[5]", [&] { rl::rloo(scores, groups.narrow(0, 0, 5), mask); }));
  CHECK_NOTHROW(refuses("expected int64", [&] { rl::opo(scores, groups.to(torch::kInt), mask); }));
  CHECK_NOTHROW(refuses("[6, 6]", [&] { rl::gae(rewards, rewards.narrow(1, 0, 6), mask); }));
  CHECK_NOTHROW(refuses("gamma 1.5", [&] { rl::gae(rewards, rewards, mask, {.gamma = 1.5}); }));
  CHECK_NOTHROW(refuses("has no token", [&] { rl::whiten(rewards, mask * 0); }));
  CHECK_NOTHROW(refuses("alone in its group", [&] { rl::grpo(scores, groups, mask, {.alone = LoneAnswer::refuse}); }));
  CHECK_NOTHROW(refuses("3 weights", [&] { rl::gdpo(torch::stack({scores, scores}, 1), groups, mask, {1, 2, 3}); }));
  CHECK_NOTHROW(refuses("an undefined tensor", [&] { rl::remax(rewards, {}, mask); }));
  CHECK(rl::whiten(rewards, torch::arange(42).reshape({6, 7}).eq(5)).eq(0).all().item<bool>());  // one token
}
