// Advantages of answers that are compared in groups, against loops over the groups.
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

// One group's members, by its number.
std::map<int64_t, std::vector<size_t>> members() {
  std::map<int64_t, std::vector<size_t>> all;
  const auto numbers = rl_group_numbers();
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
      lengths.push_back(static_cast<double>(rl_tokens_of(mask[b]).size()));
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

}  // namespace

TEST_CASE("rl advantages: answers compared in groups", "[rl]") {
  const auto scores = rl_scores(), groups = rl_group_numbers(), mask = rl_mask();
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
  near(rl::reinforce_plus_plus_baseline(scores, groups, mask), rl_whitened(differences, m), "REINFORCE++ with a baseline");
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
  const auto first = rl_scores(), second = rl_numbers({6}, 9);
  const auto compared = [](auto& x, auto&) { return grpo_row(x); };
  auto sum = by_group(rl_row(first), 0, compared);
  const auto more = by_group(rl_row(second), 0, compared);
  for (size_t b = 0; b < 6; ++b) {
    for (size_t t = 0; t < 7; ++t) sum[b][t] = 0.5 * sum[b][t] + 2 * more[b][t];
  }
  const auto got = rl::gdpo(torch::stack({first, second}, 1), rl_group_numbers(), rl_mask(), {0.5, 2});
  CHECK_NOTHROW(rl_near(got, rl_whitened(sum, rl_rows(rl_mask())), "GDPO"));
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
  CHECK_NOTHROW(refuses("alone", [&] { rl::grpo_pass_at_k(scores, rl_group_numbers(), rl_mask(), {.alone = LoneAnswer::zero}); }));
}

TEST_CASE("rl advantages: the optimal baseline of tokens", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), logp = rl_numbers({6, 7}, 2, -2, -0.1), squares = rl_numbers({6, 7}, 3, 0.1, 0.9);
  const auto weights = rl_numbers({6, 7}, 4, 0.5, 2), groups = rl_group_numbers();
  const auto mask = rl_rows(rl_mask()), r = rl_rows(rewards), l = rl_rows(logp), q = rl_rows(squares), w = rl_rows(weights);
  for (const bool weighted : {false, true}) {
    RlRows expected(6, RlRow(7)), returns = expected;
    std::vector<RlRow> g(6), energy(6);  // by number of the token
    for (size_t b = 0; b < 6; ++b) {
      const auto tokens = rl_tokens_of(mask[b]);
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
        const auto tokens = rl_tokens_of(mask[b]);
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

TEST_CASE("rl advantages: groups on ranks are those of one device", "[rl]") {
  const auto rewards = rl_numbers({6, 7}, 1), values = rl_numbers({6, 7}, 2), logp = rl_numbers({6, 7}, 3, -2, -0.1);
  const auto scores = rl_scores(), groups = rl_group_numbers(), mask = rl_mask(), two = torch::stack({scores, rl_numbers({6}, 9)}, 1);
  const auto pairs = torch::tensor({1, 2, 1, 2, 2, 1}, torch::kLong);
  CHECK_NOTHROW(rl_same_on_ranks("OTB", [&](const RlShared& on) {
    return std::vector<at::Tensor>{
        rl::optimal_token_baseline(on(rewards), on(logp), on(logp.exp()), on(groups), on(mask), on(values)).advantages};
  }));
  CHECK_NOTHROW(rl_same_on_ranks("whitened groups", [&](const RlShared& on) {
    return std::vector<at::Tensor>{rl::gdpo(on(two), on(groups), on(mask)),
                                   rl::reinforce_plus_plus_baseline(on(scores), on(groups), on(mask))};
  }));
  // To the last bit: groups are compared as a whole.
  CHECK_NOTHROW(rl_same_on_ranks(
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
