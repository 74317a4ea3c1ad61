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

// Answers to three prompts, mixed; the fifth is alone. Its row is the one that the mask holds from its sixth token on.
at::Tensor group_numbers() { return torch::tensor({70, -3, 70, -3, 5, 70}, torch::kLong); }
at::Tensor scores_of_answers() { return torch::tensor({1.0, 0.25, 0.0, 0.75, 2.0, 0.5}, torch::kDouble); }

// The indices of the tokens that count.
std::vector<size_t> tokens_of(const RlRow& mask) {
  std::vector<size_t> tokens;
  for (size_t t = 0; t < mask.size(); ++t) {
    if (mask[t] != 0) tokens.push_back(t);
  }
  return tokens;
}

RlRows whitened(RlRows x, const RlRows& mask) {
  std::vector<double*> all;
  for (size_t b = 0; b < x.size(); ++b) {
    for (size_t t = 0; t < x[b].size(); ++t) {
      if (mask[b][t] != 0) all.push_back(&x[b][t]);
      else x[b][t] = 0;
    }
  }
  const auto count = static_cast<double>(all.size());
  long double mean = 0, variance = 0;
  for (const auto* v : all) mean += *v / count;
  for (const auto* v : all) variance += (*v - mean) * (*v - mean) / (count - 1);
  for (auto* v : all) *v = static_cast<double>((*v - mean) / std::sqrt(variance + 1e-8L));
  return x;
}

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
    const auto tokens = tokens_of(mask[b]);
    RlRow r, v;
    for (const auto t : tokens) {
      r.push_back(rewards[b][t]);
      v.push_back(values[b][t]);
    }
    const double lambda = o.length_alpha > 0 ? std::max(0.0, 1 - 1 / (o.length_alpha * static_cast<double>(r.size()))) : o.lambda;
    for (size_t k = 0; k < tokens.size(); ++k) {
      out.advantages[b][tokens[k]] = advantage_by_sum(r, v, k, o.gamma, lambda);
      out.returns[b][tokens[k]] = advantage_by_sum(r, v, k, o.gamma, o.critic_lambda.value_or(o.lambda)) + v[k];
    }
  }
  return out;
}

// One group's members, by its number.
std::map<int64_t, std::vector<size_t>> members() {
  std::map<int64_t, std::vector<size_t>> all;
  const auto numbers = group_numbers();
  for (int64_t b = 0; b < 6; ++b) all[numbers[b].item<int64_t>()].push_back(b);
  return all;
}

// [batch, time] of a function of a group's scores and lengths that gives one number for each member.
using OfGroup = std::function<RlRow(const RlRow& scores, const RlRow& lengths)>;
RlRows by_group(const RlRow& scores, double alone, const OfGroup& f) {
  const auto mask = rl_rows(rl_mask());
  RlRows rows = mask;
  for (const auto& [number, group] : members()) {
    RlRow own, lengths;
    for (const auto b : group) {
      own.push_back(scores[b]);
      lengths.push_back(static_cast<double>(tokens_of(mask[b]).size()));
    }
    const auto advantages = group.size() == 1 ? RlRow{alone} : f(own, lengths);
    for (size_t i = 0; i < group.size(); ++i) {
      for (auto& each : rows[group[i]]) each *= advantages[i];
    }
  }
  return rows;
}

double mean_of(const RlRow& x) { return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size()); }

double deviation_of(const RlRow& x) {
  // From differences of all pairs, which need no mean: var = sum over i < j of (x_i - x_j)^2 / (n (n - 1)).
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < i; ++j) sum += (x[i] - x[j]) * (x[i] - x[j]);
  }
  const auto n = static_cast<double>(x.size());
  return std::sqrt(sum / (n * (n - 1)));
}

RlRow grpo_row(const RlRow& x) {
  RlRow y;
  for (const auto each : x) y.push_back((each - mean_of(x)) / (deviation_of(x) + 1e-6));
  return y;
}

RlRow centered(const RlRow& x) {
  RlRow y;
  for (const auto each : x) y.push_back(each - mean_of(x));
  return y;
}

// A function of whole batches is the same on ranks, with everything cut by rows.
using OfBatch = std::function<std::vector<at::Tensor>(const RlShared& shared)>;
void same_on_ranks(const std::string& name, const OfBatch& f, double bound = 1e-12) {
  std::vector<RlRows> expected;
  for (const auto& x : f([](const at::Tensor& x) { return x; })) expected.push_back(rl_rows(x));
  rl_on_ranks([&](const RlShared& shared, const DeviceMesh&) {
    const auto got = f(shared);
    for (size_t i = 0; i < got.size(); ++i) rl_near(got[i], expected[i], name, bound);
  });
}

}  // namespace

TEST_CASE("rl advantages: GAE is the sum of its definition", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), values = rl_numbers({6, 7}, 2);
  const auto mask = rl_rows(rl_mask());
  for (const rl::GaeOptions& options :
       {rl::GaeOptions{}, rl::GaeOptions{.gamma = 0.9, .lambda = 0.8}, rl::GaeOptions{.gamma = 0.95, .lambda = 0.7, .critic_lambda = 1.0},
        rl::GaeOptions{.length_alpha = 0.4}, rl::GaeOptions{.gamma = 0.99, .critic_lambda = 0.5, .length_alpha = 0.25},
        rl::GaeOptions{.gamma = 0, .lambda = 0}}) {
    auto plain = options;
    plain.whiten = false;
    const auto expected = gae_by_sums(rl_rows(rewards), rl_rows(values), mask, options);
    const auto got = rl::gae(rewards, values, rl_mask(), plain);
    CHECK_NOTHROW(rl_near(got.advantages, expected.advantages, "advantages"));
    CHECK_NOTHROW(rl_near(got.returns, expected.returns, "returns"));
    const auto whitened_got = rl::gae(rewards, values, rl_mask(), options);
    CHECK_NOTHROW(rl_near(whitened_got.advantages, whitened(expected.advantages, mask), "whitened advantages"));
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
  CHECK(rl::remax(spoiled_rewards, scores_of_answers(), rl_mask())
            .advantages.equal(rl::remax(rewards, scores_of_answers(), rl_mask()).advantages));
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
      for (const auto t : tokens_of(mask[b])) {
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
  const auto greedy = rl_row(scores_of_answers());
  for (size_t b = 0; b < 6; ++b) {
    const auto tokens = tokens_of(mask[b]);
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
  CHECK_NOTHROW(rl_near(plus.advantages, whitened(discounted, mask), "advantages"));
  const auto max = rl::remax(rewards, scores_of_answers(), rl_mask());
  CHECK_NOTHROW(rl_near(max.returns, sums, "ReMax's returns"));
  CHECK_NOTHROW(rl_near(max.advantages, ahead_of_greedy, "ReMax's advantages"));
}

TEST_CASE("rl advantages: scores stand at last tokens and are sums of rewards", "[rl]") {
  const auto rewards = rl::at_last_token(scores_of_answers(), rl_mask());
  RlRows expected(6, RlRow(7));
  const auto mask = rl_rows(rl_mask()), scores = RlRows{rl_row(scores_of_answers())};
  for (size_t b = 0; b < 6; ++b) {
    if (!tokens_of(mask[b]).empty()) expected[b][tokens_of(mask[b]).back()] = scores[0][b];
  }
  CHECK_NOTHROW(rl_near(rewards, expected, "rewards"));
  auto with_tokens = scores_of_answers();
  with_tokens[3] = 0;  // this answer is empty
  CHECK(rl::scores_of(rewards, rl_mask()).equal(with_tokens));
}

TEST_CASE("rl advantages: answers compared in groups", "[rl]") {
  const auto scores = scores_of_answers(), groups = group_numbers(), mask = rl_mask();
  const auto s = rl_row(scores);
  const auto m = rl_rows(mask);
  const auto near = [&](const at::Tensor& got, const RlRows& expected, const std::string& name) {
    CHECK_NOTHROW(rl_near(got, expected, name));
  };
  near(rl::grpo(scores, groups, mask), by_group(s, 0, [](auto& x, auto&) { return grpo_row(x); }), "GRPO");
  near(rl::grpo(scores, groups, mask, {.alone = LoneAnswer::score}), by_group(s, 2, [](auto& x, auto&) { return grpo_row(x); }),
       "GRPO alone");
  const auto differences = by_group(s, 0, [](auto& x, auto&) { return centered(x); });
  near(rl::grpo(scores, groups, mask, {.by_std = false}), differences, "Dr.GRPO");
  near(rl::reinforce_plus_plus_baseline(scores, groups, mask), whitened(differences, m), "REINFORCE++ with a baseline");
  const auto others = [](const RlRow& x, const RlRow&) {
    RlRow y;
    for (size_t i = 0; i < x.size(); ++i) {
      double sum = 0;
      for (size_t j = 0; j < x.size(); ++j) sum += j == i ? 0 : x[j];
      y.push_back(x[i] - sum / static_cast<double>(x.size() - 1));
    }
    return y;
  };
  near(rl::rloo(scores, groups, mask), by_group(s, 0, others), "RLOO");
  near(rl::rloo(scores, groups, mask, LoneAnswer::score), by_group(s, 2, others), "RLOO alone");
  near(rl::opo(scores, groups, mask),
       by_group(s, 0,
                [](const RlRow& x, const RlRow& lengths) {
                  double above = 0, below = 0;
                  for (size_t i = 0; i < x.size(); ++i) {
                    above += x[i] * lengths[i];
                    below += lengths[i];
                  }
                  RlRow y;
                  for (const auto each : x) y.push_back(each - above / below);
                  return y;
                }),
       "OPO");
  // Five of six scores are not 0.
  near(rl::gpg(scores, groups, mask, 2),
       by_group(s, 0,
                [](auto& x, auto&) {
                  auto y = centered(x);
                  for (auto& each : y) each *= 6.0 / 5 / 2;
                  return y;
                }),
       "GPG");
}

TEST_CASE("rl advantages: several kinds of scores", "[rl]") {
  const auto first = scores_of_answers(), second = rl_numbers({6}, 9);
  const auto compared = [](auto& x, auto&) { return grpo_row(x); };
  auto sum = by_group(rl_row(first), 0, compared);
  const auto more = by_group(rl_row(second), 0, compared);
  for (size_t b = 0; b < 6; ++b) {
    for (size_t t = 0; t < 7; ++t) sum[b][t] = 0.5 * sum[b][t] + 2 * more[b][t];
  }
  const auto got = rl::gdpo(torch::stack({first, second}, 1), group_numbers(), rl_mask(), {0.5, 2});
  CHECK_NOTHROW(rl_near(got, whitened(sum, rl_rows(rl_mask())), "GDPO"));
}

TEST_CASE("rl advantages: only the best of a group", "[rl]") {
  const auto groups = torch::tensor({1, 2, 1, 2, 2, 1}, torch::kLong);
  const auto scores = torch::tensor({1.0, 0.5, 3.0, 0.5, 0.25, 1.5}, torch::kDouble);
  auto expected = rl_rows(rl_mask());
  for (size_t b = 0; b < 6; ++b) {
    for (auto& each : expected[b]) each *= b == 2 ? 1.5 / (deviation_of({1, 3, 1.5}) + 1e-6) : 0;
  }
  CHECK_NOTHROW(rl_near(rl::grpo_pass_at_k(scores, groups, rl_mask()), expected, "pass at k"));
  const auto free = rl_rows(rl::grpo_pass_at_k(scores, groups, rl_mask(), {.by_std = false}));
  CHECK(free[2][0] == 1.5);
  CHECK_NOTHROW(refuses("alone", [&] { rl::grpo_pass_at_k(scores, group_numbers(), rl_mask(), {.alone = LoneAnswer::zero}); }));
}

TEST_CASE("rl advantages: the optimal baseline of tokens", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), logp = rl_numbers({6, 7}, 2, -2, -0.1), squares = rl_numbers({6, 7}, 3, 0.1, 0.9);
  const auto weights = rl_numbers({6, 7}, 4, 0.5, 2), groups = group_numbers();
  const auto mask = rl_rows(rl_mask()), r = rl_rows(rewards), l = rl_rows(logp), q = rl_rows(squares), w = rl_rows(weights);
  for (const bool weighted : {false, true}) {
    RlRows expected(6, RlRow(7)), returns = expected;
    std::vector<RlRow> g(6), energy(6);  // by number of the token
    for (size_t b = 0; b < 6; ++b) {
      const auto tokens = tokens_of(mask[b]);
      double sum = 0;
      for (const auto t : tokens) {
        sum += (1 - 2 * std::exp(l[b][t]) + q[b][t]) * (weighted ? w[b][t] * w[b][t] : 1);
        energy[b].push_back(sum);
        g[b].push_back(0);
        for (const auto later : tokens) g[b].back() += later >= t ? r[b][later] : 0;
      }
    }
    for (const auto& [number, group] : members()) {
      for (const auto b : group) {
        const auto tokens = tokens_of(mask[b]);
        for (size_t k = 0; k < tokens.size(); ++k) {
          double above = 0, below = 1e-8;
          int with_token = 0;
          for (const auto other : group) {
            if (k >= g[other].size()) continue;
            above += g[other][k] * energy[other][k];
            below += energy[other][k];
            ++with_token;
          }
          expected[b][tokens[k]] = g[b][k] - (with_token > 1 ? above / below : 0);
          returns[b][tokens[k]] = g[b][k];
        }
      }
    }
    const auto got = rl::optimal_token_baseline(rewards, logp, squares, groups, rl_mask(), weighted ? weights : at::Tensor());
    CHECK_NOTHROW(rl_near(got.advantages, expected, "advantages"));
    CHECK_NOTHROW(rl_near(got.returns, returns, "returns"));
  }
}

TEST_CASE("rl advantages: ranks have those of one device", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), values = rl_numbers({6, 7}, 2), logp = rl_numbers({6, 7}, 3, -2, -0.1);
  const auto scores = scores_of_answers(), groups = group_numbers(), mask = rl_mask(), two = torch::stack({scores, rl_numbers({6}, 9)}, 1);
  const auto pairs = torch::tensor({1, 2, 1, 2, 2, 1}, torch::kLong);
  const auto each = [](const rl::Advantages& a) { return std::vector<at::Tensor>{a.advantages, a.returns}; };
  CHECK_NOTHROW(same_on_ranks("GAE", [&](const RlShared& on) {
    return each(rl::gae(on(rewards), on(values), on(mask), {.gamma = 0.9, .critic_lambda = 0.8, .length_alpha = 0.4}));
  }));
  CHECK_NOTHROW(same_on_ranks("turns", [&](const RlShared& on) {
    const auto got = rl::turn_gae(on(rewards), on(values), on(mask), {}, {.gamma = 0.9, .lambda = 0.8});
    return std::vector<at::Tensor>{got.advantages, got.returns, got.value_mask};
  }));
  CHECK_NOTHROW(
      same_on_ranks("REINFORCE++", [&](const RlShared& on) { return each(rl::reinforce_plus_plus(on(rewards), on(mask), 0.9)); }));
  CHECK_NOTHROW(same_on_ranks("ReMax", [&](const RlShared& on) { return each(rl::remax(on(rewards), on(scores), on(mask))); }));
  CHECK_NOTHROW(same_on_ranks("OTB", [&](const RlShared& on) {
    return each(rl::optimal_token_baseline(on(rewards), on(logp), on(logp.exp()), on(groups), on(mask), on(values)));
  }));
  CHECK_NOTHROW(same_on_ranks("rewards", [&](const RlShared& on) {
    return std::vector<at::Tensor>{rl::at_last_token(on(scores), on(mask)), rl::scores_of(on(rewards), on(mask)).unsqueeze(1)};
  }));
  CHECK_NOTHROW(same_on_ranks("whitened groups", [&](const RlShared& on) {
    return std::vector<at::Tensor>{rl::gdpo(on(two), on(groups), on(mask)),
                                   rl::reinforce_plus_plus_baseline(on(scores), on(groups), on(mask))};
  }));
  // To the last bit: groups are compared as a whole.
  CHECK_NOTHROW(same_on_ranks(
      "groups",
      [&](const RlShared& on) {
        const auto s = on(scores), g = on(groups), m = on(mask);
        return std::vector<at::Tensor>{rl::grpo(s, g, m),
                                       rl::rloo(s, g, m),
                                       rl::opo(s, g, m),
                                       rl::gpg(s, g, m),
                                       rl::grpo_pass_at_k(s, on(pairs), m),
                                       rl::groups_with_signal(s, g).unsqueeze(1)};
      },
      0));
}

TEST_CASE("rl advantages: what cannot work says so with its shapes", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), mask = rl_mask(), scores = scores_of_answers(), groups = group_numbers();
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
