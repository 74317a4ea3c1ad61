// Divergences and rollout correction against loops.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/correction.hpp>
#include <dtensor/rl/kl.hpp>

#include <numeric>
#include <set>

using namespace dtensor;
using namespace dtensor::test;
using rl::Kl;
using rl::Level;
using rl::Over;
using rl::Statistic;

namespace {

RlNumber kl_by_formula(RlNumber d, Kl form) {
  switch (form) {
    case Kl::k1: return d;
    case Kl::magnitude: return d.real() < 0 ? -d : d;
    case Kl::k2: return d * d / 2.0;
    case Kl::k3: return std::exp(-d) - 1.0 + d;
    case Kl::k1_through: return d.real() + (d * d - d.real() * d.real()) / 2.0;
    case Kl::k3_through: return std::exp(-d.real()) - 1.0 + d.real() + (d * d - d.real() * d.real()) / 2.0;
  }
  return 0;
}

struct Pair {
  RlRows old_logp = rl_rows(rl_trained_logp()), rollout = rl_rows(rl_rollout_logp()), mask = rl_rows(rl_mask());
  double d(size_t b, size_t t) const { return old_logp[b][t] - rollout[b][t]; }
  RlRow of(size_t b, const std::function<double(double)>& f) const {
    RlRow values;
    for (size_t t = 0; t < 7; ++t) {
      if (mask[b][t] != 0) values.push_back(f(d(b, t)));
    }
    return values;
  }
};

double raw_weight(const Pair& x, size_t b, size_t t, Level level) {
  const auto all = x.of(b, [](double d) { return d; });
  if (level == Level::token) return std::exp(x.d(b, t));
  return std::exp(level == Level::sequence ? rl_sum(all) : rl_sum(all) / static_cast<double>(all.size()));
}

RlRows weights_by_loops(const rl::ImportanceOptions& o) {
  const Pair x;
  RlRows weights = x.mask;
  double total = 0, count = 0;
  for (size_t b = 0; b < 6; ++b) {
    double own = 0, tokens = 0;
    for (size_t t = 0; t < 7; ++t) {
      if (x.mask[b][t] == 0) continue;
      const double raw = raw_weight(x, b, t, o.level);
      weights[b][t] = o.lower > 0 ? (raw >= o.lower && raw <= o.upper ? raw : 0) : std::min(raw, o.upper);
      own += weights[b][t];
      tokens += 1;
    }
    if (tokens == 0) continue;
    total += o.level == Level::token ? own : own / tokens;
    count += o.level == Level::token ? tokens : 1;
  }
  if (!o.normalize) return weights;
  for (auto& row : weights) {
    for (auto& each : row) each /= total / count;
  }
  return weights;
}

bool keeps(const Pair& x, size_t b, size_t t, const rl::Rejection& r) {
  const auto token = [&](double d) {
    return r.statistic == Statistic::k1 ? d : r.statistic == Statistic::k2 ? d * d / 2 : std::exp(d) - 1 - d;
  };
  const auto all = x.of(b, token);
  double value = token(x.d(b, t));
  if (r.over == Over::sequence_sum) value = rl_sum(all);
  if (r.over == Over::sequence_mean) value = rl_sum(all) / static_cast<double>(all.size());
  if (r.over == Over::sequence_max) value = *std::ranges::max_element(all);
  return r.statistic == Statistic::k1 ? std::exp(value) >= r.lower && std::exp(value) <= r.upper : value <= r.upper;
}

}  // namespace

TEST_CASE("rl kl: estimates and their gradients", "[rl]") {
  const auto reference = rl_rows(rl_rollout_logp());
  for (const auto form : {Kl::k1, Kl::magnitude, Kl::k2, Kl::k3, Kl::k1_through, Kl::k3_through}) {
    const auto sum = [&](const RlComplexRows& logp) {
      RlNumber total = 0;
      for (size_t b = 0; b < 6; ++b) {
        for (size_t t = 0; t < 7; ++t) total += kl_by_formula(logp[b][t] - reference[b][t], form) * static_cast<double>(b + 2 * t + 1);
      }
      return total;
    };
    const auto logp = rl_trained_logp().requires_grad_();
    const auto kl = rl::kl_estimate(logp, rl_rollout_logp(), form);
    const auto total = (kl * (torch::arange(6).reshape({6, 1}) + 2 * torch::arange(7) + 1)).sum();
    total.backward();
    CHECK_NOTHROW(rl_near(rl_item(total), sum(rl_complex(rl_rows(rl_trained_logp()))).real(), "the estimate"));
    CHECK_NOTHROW(rl_near(logp.grad(), rl_gradient(rl_rows(rl_trained_logp()), sum), "its gradient"));
  }
  const auto far = torch::full({1, 1}, 1e6, torch::kFloat);
  CHECK(rl::kl_estimate(far, -far, Kl::k3).item<float>() == 10);
  CHECK(rl::kl_estimate(-far, far, Kl::k3).item<float>() == 10);
}

TEST_CASE("rl kl: in the reward and its coefficient", "[rl]") {
  const auto kl = rl::kl_estimate(rl_trained_logp(), rl_rollout_logp(), Kl::k1);
  const auto rewards = rl_numbers({6, 7}, 5);
  const Pair x;
  auto expected = rl_rows(rewards);
  double mean = 0, sequences = 0;
  for (size_t b = 0; b < 6; ++b) {
    for (size_t t = 0; t < 7; ++t) expected[b][t] = x.mask[b][t] == 0 ? 0 : expected[b][t] - 0.3 * x.d(b, t);
    const auto all = x.of(b, [](double d) { return d; });
    if (all.empty()) continue;
    mean += rl_sum(all) / static_cast<double>(all.size());
    sequences += 1;
  }
  CHECK_NOTHROW(rl_near(rl::rewards_with_kl(rewards, kl, rl_mask(), 0.3), expected, "rewards"));
  CHECK_NOTHROW(rl_near(rl::mean_kl(kl, rl_mask(), rl::count(rl_mask())), mean / sequences, "the mean"));
  rl::KlCoefficient fixed(0.2), adaptive(0.2, 6, 1000);
  fixed.update(100, 10);
  CHECK(fixed.value() == 0.2);
  adaptive.update(100, 10);
  CHECK_NOTHROW(rl_near(adaptive.value(), 0.2 * (1 + 0.2 * 10 / 1000), "far above"));
  adaptive.update(5.4, 10);
  CHECK_NOTHROW(rl_near(adaptive.value(), 0.2 * 1.002 * (1 - 0.1 * 10 / 1000), "just below"));
  const auto before = adaptive.value();
  adaptive.update(0, 1e6);
  CHECK_NOTHROW(rl_near(adaptive.value(), 0.1 * before, "far below for long"));
  CHECK_NOTHROW(refuses("target of 0", [] { rl::KlCoefficient(0.1, 0, 1); }));
  CHECK_NOTHROW(refuses("divergence of nan", [&] { adaptive.update(std::nan(""), 1); }));
}

TEST_CASE("rl correction: weights are those of loops on one device and on ranks", "[rl]") {
  for (const auto level : {Level::token, Level::sequence, Level::sequence_mean}) {
    for (const double lower : {0.0, 0.7}) {
      for (const bool normalize : {false, true}) {
        const rl::ImportanceOptions options{level, 1.3, lower, normalize};
        const auto expected = weights_by_loops(options);
        CHECK_NOTHROW(rl_near(rl::importance_weights(rl_trained_logp(), rl_rollout_logp(), rl_mask(), options), expected, "weights"));
        CHECK_NOTHROW(rl_on_ranks([&](const RlShared& on, const DeviceMesh&) {
          rl_near(rl::importance_weights(on(rl_trained_logp()), on(rl_rollout_logp()), on(rl_mask()), options), expected, "weights");
        }));
      }
    }
  }
}

TEST_CASE("rl correction: rejected tokens and sequences", "[rl]") {
  const Pair x;
  std::set<double> counts;
  for (const auto statistic : {Statistic::k1, Statistic::k2, Statistic::k3}) {
    for (const auto over : {Over::token, Over::sequence_sum, Over::sequence_mean, Over::sequence_max}) {
      if (statistic == Statistic::k1 && over == Over::sequence_max) continue;
      const double upper = statistic == Statistic::k1 ? 1.5 : over == Over::sequence_sum ? 0.5 : over == Over::sequence_mean ? 0.1 : 0.25;
      const std::vector<rl::Rejection> rejections{{statistic, over, 0.6, upper}, {Statistic::k2, Over::token, 0, 0.28}};
      RlRows expected = x.mask;
      double kept = 0;
      for (size_t b = 0; b < 6; ++b) {
        for (size_t t = 0; t < 7; ++t) {
          if (x.mask[b][t] == 0) continue;
          expected[b][t] = keeps(x, b, t, rejections[0]) && keeps(x, b, t, rejections[1]);
          kept += expected[b][t];
        }
      }
      CHECK(kept > 0);
      counts.insert(kept);
      CHECK_NOTHROW(rl_near(rl::kept_tokens(rl_trained_logp(), rl_rollout_logp(), rl_mask(), rejections), expected, "the mask"));
    }
  }
  CHECK(counts.size() > 3);
  CHECK(rl::kept_tokens(rl_trained_logp(), rl_rollout_logp(), rl_mask(), {}).equal(rl_mask().ne(0)));
  CHECK_NOTHROW(refuses("both signs", [] {
    rl::kept_tokens(rl_trained_logp(), rl_rollout_logp(), rl_mask(), {{Statistic::k1, Over::sequence_max}});
  }));
  CHECK_NOTHROW(refuses("bounds 3 and 2", [] { rl::importance_weights(rl_trained_logp(), rl_rollout_logp(), rl_mask(), {.lower = 3}); }));
}

TEST_CASE("rl correction: how far policies are apart adds up over microbatches", "[rl]") {
  const Pair x;
  double kl = 0, k3 = 0, square = 0, product = 0, ppl = 0, tokens = 0, sequences = 0;
  for (size_t b = 0; b < 6; ++b) {
    const auto all = x.of(b, [](double d) { return d; });
    for (const auto d : all) {
      kl -= d;
      k3 += std::exp(d) - 1 - d;
      square += std::exp(d) * std::exp(d);
      tokens += 1;
    }
    if (all.empty()) continue;
    product += std::exp(2 * rl_sum(all));
    ppl -= rl_sum(all) / static_cast<double>(all.size());
    sequences += 1;
  }
  const auto counts = rl::count(rl_mask());
  RlRow sums(5);
  for (const int64_t begin : {0, 3}) {
    const auto part = [&](const at::Tensor& all) { return all.narrow(0, begin, 3); };
    const auto m = rl::mismatch(part(rl_trained_logp()), part(rl_rollout_logp()), part(rl_mask()), counts);
    const at::Tensor each[] = {m.kl, m.k3, m.ratio_square, m.sequence_ratio_square, m.log_ppl_difference};
    for (size_t i = 0; i < 5; ++i) sums[i] += rl_item(each[i]);
  }
  CHECK_NOTHROW(rl_near(sums[0], kl / tokens, "k1"));
  CHECK_NOTHROW(rl_near(sums[1], k3 / tokens, "k3"));
  CHECK_NOTHROW(rl_near(sums[2], square / tokens, "the square"));
  CHECK_NOTHROW(rl_near(sums[3], product / sequences, "the square of the product"));
  CHECK_NOTHROW(rl_near(sums[4], ppl / sequences, "the difference of perplexities"));
  const auto weights = rl::importance_weights(rl_trained_logp(), rl_rollout_logp(), rl_mask(), {.upper = 100});
  CHECK_NOTHROW(rl_near(rl::effective_sample_size(weights, rl_mask()), std::pow(rl_item(weights.sum()), 2) / tokens / square, "ESS"));
  CHECK_NOTHROW(rl_near(rl::effective_sample_size(weights * 0 + 3, rl_mask()), 1, "ESS of equal weights"));
}
