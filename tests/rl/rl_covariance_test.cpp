// Losses by covariance, and learning from given answers, against loops.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/covariance_losses.hpp>
#include <dtensor/rl/sft.hpp>

#include <set>

using namespace dtensor;
using namespace dtensor::test;
using rl::Aggregation;

namespace {

rl::PolicyTerms covariance_terms() {
  return {rl_trained_logp(), rl_rollout_logp(), rl_numbers({6, 7}, 3, -2, 2), rl_mask(), rl_numbers({6, 7}, 4, 0.5, 1.5)};
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
    CHECK(rl_sum(flat) == 3);
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

TEST_CASE("rl sft: likelihood", "[rl]") {
  const auto mask = rl_rows(rl_mask());
  const auto logp = rl_trained_logp().requires_grad_();
  const auto loss = rl::sft_loss(logp, rl_mask(), {rl::count(rl_mask())});
  loss.backward();
  const auto nll = [&](const RlComplexRows& x) {
    return rl_aggregated(mask, Aggregation::token_mean, 0, [&](size_t b, size_t t) { return -x[b][t]; });
  };
  CHECK_NOTHROW(rl_near(rl_item(loss), nll(rl_complex(rl_rows(rl_trained_logp()))).real(), "the likelihood"));
  CHECK_NOTHROW(rl_near(logp.grad(), rl_gradient(rl_rows(rl_trained_logp()), nll), "its gradient"));
}

TEST_CASE("rl sft: preferences", "[rl]") {
  const auto mask = rl_rows(rl_mask());
  const auto sum_row = [&](const RlComplexRows& x, size_t b) {
    RlNumber sum = 0;
    for (size_t t = 0; t < 7; ++t) sum += mask[b][t] * x[b][t];
    return sum;
  };
  for (const double smoothing : {0.0, 0.1}) {
    // Answers 0, 2, 5 are chosen, 1, 3, 4 rejected.
    const auto chosen = torch::tensor({0, 2, 5}), rejected = torch::tensor({1, 3, 4});
    const auto reference = rl_rows(rl_rollout_logp());
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
    const auto trained = rl_trained_logp().requires_grad_();
    const auto s = rl::sequence_logp(trained, rl_mask()), r = rl::sequence_logp(rl_rollout_logp(), rl_mask());
    const auto pick = [](const at::Tensor& x, const at::Tensor& index) { return x.index_select(0, index); };
    const auto dpo = rl::dpo_loss(pick(s, chosen), pick(s, rejected), pick(r, chosen), pick(r, rejected), 3,
                                  {.beta = 0.5, .label_smoothing = smoothing});
    dpo.loss.backward();
    CHECK_NOTHROW(rl_near(rl_item(dpo.loss), by_formula(rl_complex(rl_rows(rl_trained_logp()))).real(), "DPO"));
    CHECK_NOTHROW(rl_near(trained.grad(), rl_gradient(rl_rows(rl_trained_logp()), by_formula), "its gradient"));
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
                                   {.beta = 0.5, .label_smoothing = smoothing})
                          .loss),
              rl_item(dpo.loss), "ranks");
    }));
  }
  CHECK_NOTHROW(refuses("label_smoothing of 0.5", [&] {
    rl::dpo_loss(torch::zeros({2}), torch::zeros({2}), torch::zeros({2}), torch::zeros({2}), 2, {.label_smoothing = 0.5});
  }));
  CHECK_NOTHROW(refuses("[3]", [&] { rl::dpo_loss(torch::zeros({2}), torch::zeros({3}), torch::zeros({2}), torch::zeros({2}), 2); }));
}
