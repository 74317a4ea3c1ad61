// Divergences, rollout correction, losses by covariance, and learning from given answers, against loops.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/correction.hpp>
#include <dtensor/rl/covariance_losses.hpp>
#include <dtensor/rl/kl.hpp>
#include <dtensor/rl/sft.hpp>

#include <numeric>
#include <set>

using namespace dtensor;
using namespace dtensor::test;
using rl::Aggregation;
using rl::Kl;
using rl::Level;
using rl::Over;
using rl::Statistic;

namespace {

at::Tensor trained_logp() { return rl_numbers({6, 7}, 1, -3, -0.1); }
at::Tensor rollout_logp() { return trained_logp() + rl_numbers({6, 7}, 2, -0.8, 0.8); }

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
  RlRows old_logp = rl_rows(trained_logp()), rollout = rl_rows(rollout_logp()), mask = rl_rows(rl_mask());
  double d(size_t b, size_t t) const { return old_logp[b][t] - rollout[b][t]; }
  RlRow of(size_t b, const std::function<double(double)>& f) const {
    RlRow values;
    for (size_t t = 0; t < 7; ++t) {
      if (mask[b][t] != 0) values.push_back(f(d(b, t)));
    }
    return values;
  }
};

double sum_of(const RlRow& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

double raw_weight(const Pair& x, size_t b, size_t t, Level level) {
  const auto all = x.of(b, [](double d) { return d; });
  if (level == Level::token) return std::exp(x.d(b, t));
  return std::exp(level == Level::sequence ? sum_of(all) : sum_of(all) / static_cast<double>(all.size()));
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
  if (r.over == Over::sequence_sum) value = sum_of(all);
  if (r.over == Over::sequence_mean) value = sum_of(all) / static_cast<double>(all.size());
  if (r.over == Over::sequence_max) value = *std::ranges::max_element(all);
  return r.statistic == Statistic::k1 ? std::exp(value) >= r.lower && std::exp(value) <= r.upper : value <= r.upper;
}

rl::PolicyTerms covariance_terms() {
  return {trained_logp(), rollout_logp(), rl_numbers({6, 7}, 3, -2, 2), rl_mask(), rl_numbers({6, 7}, 4, 0.5, 1.5)};
}

RlRows covariances_by_loops(const rl::PolicyTerms& terms) {
  const auto a = rl_rows(terms.advantages), l = rl_rows(terms.logp), mask = rl_rows(terms.mask);
  double mean_a = 0, mean_l = 0, count = 0;
  for (size_t b = 0; b < 6; ++b) {
    for (size_t t = 0; t < 7; ++t) {
      mean_a += mask[b][t] * a[b][t];
      mean_l += mask[b][t] * l[b][t];
      count += mask[b][t];
    }
  }
  RlRows c = a;
  for (size_t b = 0; b < 6; ++b) {
    for (size_t t = 0; t < 7; ++t) c[b][t] = (a[b][t] - mean_a / count) * (l[b][t] - mean_l / count);
  }
  return c;
}

}  // namespace

TEST_CASE("rl kl: estimates and their gradients", "[rl]") {
  const auto reference = rl_rows(rollout_logp());
  for (const auto form : {Kl::k1, Kl::magnitude, Kl::k2, Kl::k3, Kl::k1_through, Kl::k3_through}) {
    const auto sum = [&](const RlComplexRows& logp) {
      RlNumber total = 0;
      for (size_t b = 0; b < 6; ++b) {
        for (size_t t = 0; t < 7; ++t) total += kl_by_formula(logp[b][t] - reference[b][t], form) * static_cast<double>(b + 2 * t + 1);
      }
      return total;
    };
    const auto logp = trained_logp().requires_grad_();
    const auto kl = rl::kl_estimate(logp, rollout_logp(), form);
    const auto total = (kl * (torch::arange(6).reshape({6, 1}) + 2 * torch::arange(7) + 1)).sum();
    total.backward();
    CHECK_NOTHROW(rl_near(rl_item(total), sum(rl_complex(rl_rows(trained_logp()))).real(), "the estimate"));
    CHECK_NOTHROW(rl_near(logp.grad(), rl_gradient(rl_rows(trained_logp()), sum), "its gradient"));
  }
  const auto far = torch::full({1, 1}, 1e6, torch::kFloat);
  CHECK(rl::kl_estimate(far, -far, Kl::k3).item<float>() == 10);
  CHECK(rl::kl_estimate(-far, far, Kl::k3).item<float>() == 10);
}

TEST_CASE("rl kl: in the reward and its coefficient", "[rl]") {
  const auto kl = rl::kl_estimate(trained_logp(), rollout_logp(), Kl::k1);
  const auto rewards = rl_numbers({6, 7}, 5);
  const Pair x;
  auto expected = rl_rows(rewards);
  double mean = 0, sequences = 0;
  for (size_t b = 0; b < 6; ++b) {
    for (size_t t = 0; t < 7; ++t) expected[b][t] = x.mask[b][t] == 0 ? 0 : expected[b][t] - 0.3 * x.d(b, t);
    const auto all = x.of(b, [](double d) { return d; });
    if (all.empty()) continue;
    mean += sum_of(all) / static_cast<double>(all.size());
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
  CHECK_NOTHROW(refuses("target of 0", [] { rl::KlCoefficient(0.1, 0, 1); }));
  CHECK_NOTHROW(refuses("divergence of nan", [&] { adaptive.update(std::nan(""), 1); }));
}

TEST_CASE("rl correction: weights are those of loops on one device and on ranks", "[rl]") {
  for (const auto level : {Level::token, Level::sequence, Level::sequence_mean}) {
    for (const double lower : {0.0, 0.7}) {
      for (const bool normalize : {false, true}) {
        const rl::ImportanceOptions options{level, 1.3, lower, normalize};
        const auto expected = weights_by_loops(options);
        CHECK_NOTHROW(rl_near(rl::importance_weights(trained_logp(), rollout_logp(), rl_mask(), options), expected, "weights"));
        CHECK_NOTHROW(rl_on_ranks([&](const RlShared& on, const DeviceMesh&) {
          rl_near(rl::importance_weights(on(trained_logp()), on(rollout_logp()), on(rl_mask()), options), expected, "weights");
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
      CHECK_NOTHROW(rl_near(rl::kept_tokens(trained_logp(), rollout_logp(), rl_mask(), rejections), expected, "the mask"));
    }
  }
  CHECK(counts.size() > 3);
  CHECK(rl::kept_tokens(trained_logp(), rollout_logp(), rl_mask(), {}).equal(rl_mask().ne(0)));
  CHECK_NOTHROW(refuses("both signs", [] {
    rl::kept_tokens(trained_logp(), rollout_logp(), rl_mask(), {{Statistic::k1, Over::sequence_max}});
  }));
  CHECK_NOTHROW(refuses("bounds 3 and 2", [] { rl::importance_weights(trained_logp(), rollout_logp(), rl_mask(), {.lower = 3}); }));
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
    product += std::exp(2 * sum_of(all));
    ppl -= sum_of(all) / static_cast<double>(all.size());
    sequences += 1;
  }
  const auto counts = rl::count(rl_mask());
  RlRow sums(5);
  for (const int64_t begin : {0, 3}) {
    const auto part = [&](const at::Tensor& all) { return all.narrow(0, begin, 3); };
    const auto m = rl::mismatch(part(trained_logp()), part(rollout_logp()), part(rl_mask()), counts);
    const at::Tensor each[] = {m.kl, m.k3, m.ratio_square, m.sequence_ratio_square, m.log_ppl_difference};
    for (size_t i = 0; i < 5; ++i) sums[i] += rl_item(each[i]);
  }
  CHECK_NOTHROW(rl_near(sums[0], kl / tokens, "k1"));
  CHECK_NOTHROW(rl_near(sums[1], k3 / tokens, "k3"));
  CHECK_NOTHROW(rl_near(sums[2], square / tokens, "the square"));
  CHECK_NOTHROW(rl_near(sums[3], product / sequences, "the square of the product"));
  CHECK_NOTHROW(rl_near(sums[4], ppl / sequences, "the difference of perplexities"));
  const auto weights = rl::importance_weights(trained_logp(), rollout_logp(), rl_mask(), {.upper = 100});
  CHECK_NOTHROW(rl_near(rl::effective_sample_size(weights, rl_mask()), std::pow(rl_item(weights.sum()), 2) / tokens / square, "ESS"));
  CHECK_NOTHROW(rl_near(rl::effective_sample_size(weights * 0 + 3, rl_mask()), 1, "ESS of equal weights"));
}

TEST_CASE("rl covariance: KL-Cov pulls back tokens of the largest covariance", "[rl]") {
  const auto terms = covariance_terms();
  const auto covariances = covariances_by_loops(terms), mask = rl_rows(terms.mask);
  const rl::KlCovOptions options{.share = 0.22, .kl = 0.6};
  std::vector<std::pair<double, std::pair<size_t, size_t>>> order;
  for (size_t b = 0; b < 6; ++b) {
    for (size_t t = 0; t < 7; ++t) {
      if (mask[b][t] != 0) order.push_back({-covariances[b][t], {b, t}});
    }
  }
  std::ranges::sort(order);
  RlRows chosen(6, RlRow(7));
  const auto count = static_cast<size_t>(0.22 * static_cast<double>(order.size()));
  CHECK(count == 4);
  for (size_t i = 0; i < count; ++i) chosen[order[i].second.first][order[i].second.second] = 1;
  const auto got = rl::kl_cov_tokens(terms, options);
  CHECK_NOTHROW(rl_near(got, chosen, "chosen tokens"));
  const auto a = rl_rows(terms.advantages), old = rl_rows(terms.old_logp), w = rl_rows(terms.weights);
  const auto reference = [&](const RlComplexRows& logp) {
    return rl_aggregated(mask, Aggregation::token_mean, 0, [&](size_t b, size_t t) {
      const auto d = logp[b][t] - old[b][t];
      return w[b][t] * (-a[b][t] * std::exp(d) + 0.6 * chosen[b][t] * (d.real() < 0 ? -d : d));
    });
  };
  auto learning = terms;
  learning.logp = terms.logp.clone().requires_grad_();
  const auto loss = rl::kl_cov_loss(learning, {rl::count(terms.mask)}, options);
  loss.loss.backward();
  CHECK_NOTHROW(rl_near(rl_item(loss.loss), reference(rl_complex(rl_rows(terms.logp))).real(), "the loss"));
  CHECK_NOTHROW(rl_near(learning.logp.grad(), rl_gradient(rl_rows(terms.logp), reference), "the gradient"));
  CHECK_NOTHROW(rl_near(rl_item(loss.metrics.clip_fraction), 4.0 / static_cast<double>(order.size()), "the fraction"));
}

TEST_CASE("rl covariance: Clip-Cov spares tokens that are drawn", "[rl]") {
  const auto terms = covariance_terms();
  const auto covariances = covariances_by_loops(terms), mask = rl_rows(terms.mask);
  const auto a = rl_rows(terms.advantages), l = rl_rows(terms.logp), old = rl_rows(terms.old_logp), w = rl_rows(terms.weights);
  rl::ClipCovOptions options{.clip_low = 0.2, .clip_high = 0.3, .share = 0.16, .least = -0.5, .most = 1};
  std::set<std::vector<double>> draws;
  size_t qualify = 0;
  for (options.seed = 0; options.seed < 8; ++options.seed) {
    const auto chosen = rl_rows(rl::clip_cov_tokens(terms, options));
    std::vector<double> flat;
    qualify = 0;
    for (size_t b = 0; b < 6; ++b) {
      for (size_t t = 0; t < 7; ++t) {
        const double ratio = std::exp(l[b][t] - old[b][t]);
        const bool is_cut = a[b][t] > 0 ? ratio > 1.3 : ratio < 0.8;
        const bool may = mask[b][t] != 0 && !is_cut && covariances[b][t] > -0.5 && covariances[b][t] < 1;
        if (chosen[b][t] != 0) CHECK(may);
        qualify += may;
        flat.push_back(chosen[b][t]);
      }
    }
    CHECK(sum_of(flat) == 3);
    draws.insert(flat);
  }
  CHECK(qualify > 5);
  CHECK(draws.size() > 3);
  options.seed = 3;
  const auto chosen = rl_rows(rl::clip_cov_tokens(terms, options));
  const auto reference = [&](const RlComplexRows& logp) {
    return rl_aggregated(mask, Aggregation::token_mean, 0, [&](size_t b, size_t t) -> RlNumber {
      const auto ratio = std::exp(logp[b][t] - old[b][t]);
      return chosen[b][t] != 0 ? 0 : -w[b][t] * rl_smaller(a[b][t] * ratio, a[b][t] * rl_clip(ratio, 0.8, 1.3));
    });
  };
  auto learning = terms;
  learning.logp = terms.logp.clone().requires_grad_();
  const auto loss = rl::clip_cov_loss(learning, {rl::count(terms.mask)}, options);
  loss.loss.backward();
  CHECK_NOTHROW(rl_near(rl_item(loss.loss), reference(rl_complex(rl_rows(terms.logp))).real(), "the loss"));
  CHECK_NOTHROW(rl_near(learning.logp.grad(), rl_gradient(rl_rows(terms.logp), reference), "the gradient"));
}

TEST_CASE("rl covariance: ranks and microbatches choose the same tokens", "[rl]") {
  const auto terms = covariance_terms();
  const rl::ClipCovOptions clip{.share = 0.16, .least = -0.5, .most = 1, .seed = 5};
  const rl::KlCovOptions kl{.share = 0.22};
  const rl::Normalization by{rl::count(terms.mask)};
  const auto clip_chosen = rl::clip_cov_tokens(terms, clip), kl_chosen = rl::kl_cov_tokens(terms, kl);
  const auto clip_loss = rl_item(rl::clip_cov_loss(terms, by, clip).loss), kl_loss = rl_item(rl::kl_cov_loss(terms, by, kl).loss);
  CHECK_NOTHROW(rl_on_ranks([&](const RlShared& on, const DeviceMesh&) {
    const rl::PolicyTerms cut{on(terms.logp), on(terms.old_logp), on(terms.advantages), on(terms.mask), on(terms.weights)};
    require(full_tensor(rl::clip_cov_tokens(cut, clip)).equal(clip_chosen), "test", "other tokens");
    require(full_tensor(rl::kl_cov_tokens(cut, kl)).equal(kl_chosen), "test", "other tokens");
    rl_near(rl_item(rl::clip_cov_loss(cut, by, clip).loss), clip_loss, "Clip-Cov");
    rl_near(rl_item(rl::kl_cov_loss(cut, by, kl).loss), kl_loss, "KL-Cov");
  }));
  double sum = 0;
  for (const int64_t begin : {0, 2, 4}) {
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, 2); };
    auto own = clip;
    own.chosen = part(clip_chosen);
    const rl::PolicyTerms some{part(terms.logp), part(terms.old_logp), part(terms.advantages), part(terms.mask), part(terms.weights)};
    sum += rl_item(rl::clip_cov_loss(some, by, own).loss);
  }
  CHECK_NOTHROW(rl_near(sum, clip_loss, "microbatches"));
  CHECK_NOTHROW(refuses("share of 0", [&] { rl::kl_cov_loss(terms, by, {.share = 0}); }));
}

TEST_CASE("rl sft: likelihood and preferences", "[rl]") {
  const auto mask = rl_rows(rl_mask());
  const auto sum_row = [&](const RlComplexRows& x, size_t b) {
    RlNumber sum = 0;
    for (size_t t = 0; t < 7; ++t) sum += mask[b][t] * x[b][t];
    return sum;
  };
  const auto logp = trained_logp().requires_grad_();
  const auto loss = rl::sft_loss(logp, rl_mask(), {rl::count(rl_mask())});
  loss.backward();
  const auto nll = [&](const RlComplexRows& x) {
    return rl_aggregated(mask, Aggregation::token_mean, 0, [&](size_t b, size_t t) { return -x[b][t]; });
  };
  CHECK_NOTHROW(rl_near(rl_item(loss), nll(rl_complex(rl_rows(trained_logp()))).real(), "the likelihood"));
  CHECK_NOTHROW(rl_near(logp.grad(), rl_gradient(rl_rows(trained_logp()), nll), "its gradient"));

  for (const double smoothing : {0.0, 0.1}) {
    // Answers 0, 2, 5 are chosen, 1, 3, 4 rejected.
    const auto chosen = torch::tensor({0, 2, 5}), rejected = torch::tensor({1, 3, 4});
    const auto reference = rl_rows(rollout_logp());
    const auto by_formula = [&](const RlComplexRows& x) {
      RlNumber sum = 0;
      const size_t won[] = {0, 2, 5}, lost[] = {1, 3, 4};
      for (size_t i = 0; i < 3; ++i) {
        const auto ref = rl_complex(reference);
        const auto h = 0.5 * (sum_row(x, won[i]) - sum_row(ref, won[i]) - sum_row(x, lost[i]) + sum_row(ref, lost[i]));
        sum += (1 - smoothing) * std::log(1.0 + std::exp(-h)) + smoothing * std::log(1.0 + std::exp(h));
      }
      return sum / 3.0;
    };
    const auto trained = trained_logp().requires_grad_();
    const auto s = rl::sequence_logp(trained, rl_mask()), r = rl::sequence_logp(rollout_logp(), rl_mask());
    const auto pick = [](const at::Tensor& x, const at::Tensor& index) { return x.index_select(0, index); };
    const auto dpo = rl::dpo_loss(pick(s, chosen), pick(s, rejected), pick(r, chosen), pick(r, rejected), 3,
                                  {.beta = 0.5, .label_smoothing = smoothing});
    dpo.loss.backward();
    CHECK_NOTHROW(rl_near(rl_item(dpo.loss), by_formula(rl_complex(rl_rows(trained_logp()))).real(), "DPO"));
    CHECK_NOTHROW(rl_near(trained.grad(), rl_gradient(rl_rows(trained_logp()), by_formula), "its gradient"));
    const auto won = 0.5 * pick(s - r, chosen), lost = 0.5 * pick(s - r, rejected);
    CHECK_NOTHROW(rl_near(rl_item(dpo.accuracy), rl_item((won > lost).sum()) / 3, "the accuracy"));
    CHECK_NOTHROW(rl_near(rl_item(dpo.chosen_reward - dpo.rejected_reward), rl_item((won - lost).sum()) / 3, "the margin"));
    // Microbatches.
    double sum = 0;
    for (const int64_t i : {0, 1, 2}) {
      const auto c = chosen.narrow(0, i, 1), l = rejected.narrow(0, i, 1);
      sum += rl_item(rl::dpo_loss(pick(s, c), pick(s, l), pick(r, c), pick(r, l), 3, {.beta = 0.5, .label_smoothing = smoothing}).loss);
    }
    CHECK_NOTHROW(rl_near(sum, rl_item(dpo.loss), "microbatches"));
    CHECK_NOTHROW(rl_on_ranks([&](const RlShared& on, const DeviceMesh&) {
      const auto detached = [&](const at::Tensor& x, const at::Tensor& index) { return on(pick(x.detach(), index)); };
      rl_near(rl_item(rl::dpo_loss(detached(s, chosen), detached(s, rejected), detached(r, chosen), detached(r, rejected), 3,
                                   {.beta = 0.5, .label_smoothing = smoothing}).loss), rl_item(dpo.loss), "ranks");
    }));
  }
  CHECK_NOTHROW(refuses("label_smoothing of 0.5", [&] {
    rl::dpo_loss(torch::zeros({2}), torch::zeros({2}), torch::zeros({2}), torch::zeros({2}), 2, {.label_smoothing = 0.5});
  }));
  CHECK_NOTHROW(refuses("[3]", [&] { rl::dpo_loss(torch::zeros({2}), torch::zeros({3}), torch::zeros({2}), torch::zeros({2}), 2); }));
}
