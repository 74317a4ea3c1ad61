// Losses of a policy and of a critic: values and gradients against loops and complex steps, microbatches, masks, ranks.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/losses.hpp>
#include <dtensor/rl/value_loss.hpp>

#include <numeric>

using namespace dtensor;
using namespace dtensor::test;
using rl::Aggregation;
using rl::Normalization;
using rl::PolicyLoss;
using rl::PolicyTerms;

namespace {

PolicyTerms policy_terms(bool weighted = true) {
  PolicyTerms terms;
  terms.logp = rl_numbers({6, 7}, 1, -2.5, -0.05);
  terms.old_logp = terms.logp + rl_numbers({6, 7}, 2, -0.6, 0.6);
  terms.advantages = rl_numbers({6, 7}, 3, -2, 2);
  terms.mask = rl_mask();
  if (weighted) terms.weights = rl_numbers({6, 7}, 4, 0.2, 2);
  return terms;
}

// What a reference is written in: logp may carry a derivative.
struct Loops {
  RlComplexRows logp;
  RlRows old_logp, advantages, mask, weights;

  RlNumber d(size_t b, size_t t) const { return logp[b][t] - old_logp[b][t]; }
  double length(size_t b) const { return std::accumulate(mask[b].begin(), mask[b].end(), 0.0); }
  template <class F>
  RlNumber mean(size_t b, F f) const {
    RlNumber sum = 0;
    for (size_t t = 0; t < mask[b].size(); ++t) sum += mask[b][t] == 0 ? RlNumber(0) : RlNumber(f(t));
    return sum / length(b);
  }
};

using Token = std::function<RlNumber(const Loops&, size_t b, size_t t)>;
struct LossCase {
  std::string name;
  std::function<PolicyLoss(const PolicyTerms&, const Normalization&)> loss;
  Token token;                   // its loss, without the weight
  bool is_by_sequences = false;  // always a mean over sequences of means over tokens
};

RlNumber surrogate(double a, RlNumber ratio, double low, double high) {
  return -rl_smaller(a * ratio, a * rl_clip(ratio, 1 - low, 1 + high));
}

RlNumber dppo_token(const Loops& x, size_t b, size_t t, double low, double high, bool is_kl) {
  const double a = x.advantages[b][t], l = x.logp[b][t].real(), old = x.old_logp[b][t], p = std::exp(l), q = std::exp(old);
  const double kl = q * (old - l) + (1 - q) * std::log((1 - q + 1e-8) / (1 - p + 1e-8));
  bool keep = a > 0 ? p - q <= high : q - p <= low;
  if (is_kl) keep = a > 0 ? kl <= high || p <= q : kl <= low || p >= q;
  return keep ? -a * std::min(std::exp(l - old), 1.5) * x.logp[b][t] : 0;
}

std::vector<LossCase> loss_cases() {
  const auto ratio = [](const Loops& x, size_t b, size_t t) { return std::exp(x.d(b, t)); };
  using Dppo = rl::DppoOptions::Divergence;
  return {
      {"ppo", [](auto& x, auto& by) { return rl::ppo_loss(x, by, {.clip_low = 0.2, .clip_high = 0.28, .dual_clip = 1.4}); },
       [=](const Loops& x, size_t b, size_t t) {
         const double a = x.advantages[b][t];
         const auto l = surrogate(a, ratio(x, b, t), 0.2, 0.28);
         return a < 0 ? rl_smaller(l, -a * 1.4) : l;
       }},
      {"ppo without dual clip", [](auto& x, auto& by) { return rl::ppo_loss(x, by, {.dual_clip = 0}); },
       [=](const Loops& x, size_t b, size_t t) { return surrogate(x.advantages[b][t], ratio(x, b, t), 0.2, 0.2); }},
      {"gspo", [](auto& x, auto& by) { return rl::gspo_loss(x, by, {.clip_low = 0.05, .clip_high = 0.03}); },
       [](const Loops& x, size_t b, size_t t) {
         const double mean = x.mean(b, [&](size_t i) { return x.d(b, i); }).real();
         return surrogate(x.advantages[b][t], std::exp(mean) * std::exp(x.logp[b][t] - x.logp[b][t].real()), 0.05, 0.03);
       },
       true},
      {"cispo", [](auto& x, auto& by) { return rl::cispo_loss(x, by, {.clip_low = 0.3, .clip_high = 0.2}); },
       [](const Loops& x, size_t b, size_t t) {
         return -std::clamp(std::exp(x.d(b, t).real()), 0.7, 1.2) * x.advantages[b][t] * x.logp[b][t];
       }},
      {"sapo", [](auto& x, auto& by) { return rl::sapo_loss(x, by, {.tau_positive = 1.2, .tau_negative = 0.9}); },
       [=](const Loops& x, size_t b, size_t t) {
         const double a = x.advantages[b][t], tau = a > 0 ? 1.2 : 0.9;
         return -a * 4 / tau / (1.0 + std::exp(-tau * (ratio(x, b, t) - 1.0)));
       },
       true},
      {"gpg", [](auto& x, auto& by) { return rl::gpg_loss(x, by); },
       [](const Loops& x, size_t b, size_t t) { return -x.advantages[b][t] * x.logp[b][t]; }},
      {"dro", [](auto& x, auto& by) { return rl::dro_loss(x, by, 0.7); },
       [](const Loops& x, size_t b, size_t t) { return -x.advantages[b][t] * x.logp[b][t] + 0.35 * x.d(b, t) * x.d(b, t); }},
      {"dppo by total variation",
       [](auto& x, auto& by) {
         return rl::dppo_loss(x, by, {Dppo::total_variation, 0.03, 0.05, 1.5});
       },
       [](const Loops& x, size_t b, size_t t) { return dppo_token(x, b, t, 0.03, 0.05, false); }},
      {"dppo by KL",
       [](auto& x, auto& by) {
         return rl::dppo_loss(x, by, {Dppo::binary_kl, 0.002, 0.004, 1.5});
       },
       [](const Loops& x, size_t b, size_t t) { return dppo_token(x, b, t, 0.002, 0.004, true); }},
  };
}

Loops loops_of(const PolicyTerms& terms) {
  Loops x{{}, rl_rows(terms.old_logp), rl_rows(terms.advantages), rl_rows(terms.mask), rl_rows(terms.weights)};
  x.logp = rl_complex(rl_rows(terms.logp));
  return x;
}

struct Computed {
  double loss;
  at::Tensor gradient;
  rl::PolicyMetrics metrics;
};

Computed computed(const LossCase& one, PolicyTerms terms, const Normalization& by) {
  terms.logp = terms.logp.detach().clone().requires_grad_();
  const auto result = one.loss(terms, by);
  result.loss.backward();
  return {rl_item(result.loss), terms.logp.grad(), result.metrics};
}

Normalization normalization(const at::Tensor& mask, Aggregation how = Aggregation::token_mean) { return {rl::count(mask), how, 9}; }

// GMPO is of sequences, and has a reference of its own.
LossCase gmpo_case() {
  return {"gmpo", [](auto& x, auto& by) { return rl::gmpo_loss(x, by, {.clip_low = 0.1, .clip_high = 0.2}); }, {}, true};
}

RlNumber gmpo_by_loops(const Loops& x) {
  RlNumber sum = 0;
  double sequences = 0;
  for (size_t b = 0; b < x.mask.size(); ++b) {
    if (x.length(b) == 0) continue;
    const auto log_ratio = x.mean(b, [&](size_t t) {
      const double a = x.advantages[b][t];
      return a > 0 ? rl_smaller(x.d(b, t), 0.2) : rl_larger(x.d(b, t), -0.1);
    });
    const auto advantage = x.mean(b, [&](size_t t) { return x.advantages[b][t]; });
    const auto weight = x.mean(b, [&](size_t t) { return std::log(x.weights[b][t]); });
    sum -= advantage * std::exp(log_ratio) * std::exp(weight);
    sequences += 1;
  }
  return sum / sequences;
}

PolicyTerms part_of_terms(const PolicyTerms& terms, int64_t begin, int64_t count) {
  const auto part = [&](const at::Tensor& x) { return x.defined() ? x.narrow(0, begin, count) : x; };
  return {part(terms.logp), part(terms.old_logp), part(terms.advantages), part(terms.mask), part(terms.weights)};
}

std::vector<LossCase> all_cases() {
  auto cases = loss_cases();
  cases.push_back(gmpo_case());
  return cases;
}

}  // namespace

TEST_CASE("rl losses: values and gradients are those of loops and complex steps", "[rl]") {
  const auto terms = policy_terms();
  for (const auto& one : loss_cases()) {
    for (const auto how : kRlAggregations) {
      auto x = loops_of(terms);
      const auto reference = [&](const RlComplexRows& logp) {
        x.logp = logp;
        return rl_aggregated(x.mask, one.is_by_sequences ? Aggregation::sequence_mean_token_mean : how, 9,
                             [&](size_t b, size_t t) { return one.token(x, b, t) * x.weights[b][t]; });
      };
      const auto got = computed(one, terms, normalization(terms.mask, how));
      CHECK_NOTHROW(rl_near(got.loss, reference(x.logp).real(), one.name));
      CHECK_NOTHROW(rl_near(got.gradient, rl_gradient(rl_rows(terms.logp), reference), one.name + "'s gradient"));
    }
  }
  auto x = loops_of(terms);
  const auto reference = [&](const RlComplexRows& logp) {
    x.logp = logp;
    return gmpo_by_loops(x);
  };
  const auto got = computed(gmpo_case(), terms, normalization(terms.mask));
  CHECK_NOTHROW(rl_near(got.loss, reference(x.logp).real(), "gmpo"));
  CHECK_NOTHROW(rl_near(got.gradient, rl_gradient(rl_rows(terms.logp), reference), "gmpo's gradient"));
}

TEST_CASE("rl losses: every branch of a loss is taken by the batch of the tests", "[rl]") {
  const auto terms = policy_terms();
  for (const auto& one : all_cases()) {
    const auto metrics = computed(one, terms, normalization(terms.mask)).metrics;
    const double cut = rl_item(metrics.clip_fraction), lower = rl_item(metrics.clip_fraction_lower);
    const bool has_cut = one.name != "sapo" && one.name != "gpg" && one.name != "dro";
    const bool has_lower = one.name == "ppo" || one.name == "gmpo" || one.name.starts_with("dppo");
    CHECK((cut > 0) == has_cut);
    CHECK((lower > 0) == has_lower);
    CHECK(cut < 1);
  }
}

TEST_CASE("rl losses: metrics of PPO are counted", "[rl]") {
  const auto terms = policy_terms();
  const auto metrics = computed(loss_cases()[0], terms, normalization(terms.mask)).metrics;
  const auto x = loops_of(terms);
  double cut = 0, lower = 0, kl = 0, tokens = 0;
  for (size_t b = 0; b < x.mask.size(); ++b) {
    for (size_t t = 0; t < x.mask[b].size(); ++t) {
      if (x.mask[b][t] == 0) continue;
      const double a = x.advantages[b][t], ratio = std::exp(x.d(b, t).real());
      tokens += 1;
      kl -= x.d(b, t).real();
      cut += a > 0 ? ratio > 1.28 : ratio < 0.8;
      lower += a < 0 && ratio > 1.4;
    }
  }
  CHECK_NOTHROW(rl_near(rl_item(metrics.clip_fraction), cut / tokens, "the clip fraction"));
  CHECK_NOTHROW(rl_near(rl_item(metrics.clip_fraction_lower), lower / tokens, "the lower clip fraction"));
  CHECK_NOTHROW(rl_near(rl_item(metrics.approx_kl), kl / tokens, "the divergence"));
}

TEST_CASE("rl losses: microbatches add up to the batch", "[rl]") {
  const auto terms = policy_terms();
  for (const auto& one : all_cases()) {
    for (const auto how : kRlAggregations) {
      const auto by = normalization(terms.mask, how);
      const auto whole = computed(one, terms, by);
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{3, 3}, {1, 2, 2, 1}}) {
        double loss = 0, cut = 0;
        std::vector<at::Tensor> gradients;
        int64_t begin = 0;
        for (const auto size : sizes) {
          const auto part = computed(one, part_of_terms(terms, begin, size), by);
          loss += part.loss;
          cut += rl_item(part.metrics.clip_fraction);
          gradients.push_back(part.gradient);
          begin += size;
        }
        CHECK_NOTHROW(rl_near(loss, whole.loss, one.name));
        CHECK_NOTHROW(rl_near(cut, rl_item(whole.metrics.clip_fraction), one.name + "'s clip fraction"));
        CHECK_NOTHROW(rl_near(torch::cat(gradients), rl_rows(whole.gradient), one.name + "'s gradient"));
      }
    }
  }
}

TEST_CASE("rl losses: what is masked may be anything and gets no gradient", "[rl]") {
  const auto terms = policy_terms();
  const auto spoil = [&](const at::Tensor& x, double with) { return x.where(terms.mask.ne(0), torch::full({}, with, torch::kDouble)); };
  for (const double with : {std::nan(""), -std::numeric_limits<double>::infinity(), 1e300}) {
    auto spoiled = terms;
    spoiled.logp = spoil(terms.logp, with);
    spoiled.old_logp = spoil(terms.old_logp, -with);
    spoiled.advantages = spoil(terms.advantages, with);
    spoiled.weights = spoil(terms.weights, with);
    for (const auto& one : all_cases()) {
      const auto by = normalization(terms.mask, Aggregation::sequence_mean_token_mean);
      const auto clean = computed(one, terms, by), got = computed(one, spoiled, by);
      CHECK(got.loss == clean.loss);
      CHECK(got.gradient.equal(clean.gradient));
      CHECK(got.gradient.masked_select(terms.mask.eq(0)).eq(0).all().item<bool>());
      CHECK(rl_item(got.metrics.approx_kl) == rl_item(clean.metrics.approx_kl));
    }
  }
}

TEST_CASE("rl losses: ratios that overflow stay finite", "[rl]") {
  auto terms = policy_terms(false);
  terms.logp = terms.logp.to(torch::kFloat);
  terms.old_logp =
      torch::where(terms.advantages > 0, torch::full({}, -3e4, torch::kDouble), torch::full({}, 3e4, torch::kDouble)).to(torch::kFloat);
  terms.advantages = terms.advantages.to(torch::kFloat);
  for (const auto& one : all_cases()) {
    const auto got = computed(one, terms, normalization(terms.mask));
    CHECK(std::isfinite(got.loss));
    CHECK(got.gradient.isfinite().all().item<bool>());
    CHECK(got.gradient.scalar_type() == torch::kFloat);
  }
}

TEST_CASE("rl losses: float32 is float64 rounded", "[rl]") {
  const auto terms = policy_terms();
  const auto rounded = [](const at::Tensor& x) { return x.to(torch::kFloat); };
  const PolicyTerms short_terms{rounded(terms.logp), rounded(terms.old_logp), rounded(terms.advantages), terms.mask.to(torch::kBool),
                                rounded(terms.weights)};
  for (const auto& one : all_cases()) {
    const auto by = normalization(terms.mask);
    const auto got = computed(one, short_terms, by), expected = computed(one, terms, by);
    CHECK_NOTHROW(rl_near(got.loss, expected.loss, one.name, 2e-6));
    CHECK_NOTHROW(rl_near(got.gradient, rl_rows(expected.gradient), one.name, 2e-6));
  }
}

TEST_CASE("rl losses: ranks have the loss of one device and say nothing before it is read", "[rl]") {
  const auto terms = policy_terms();
  CHECK_NOTHROW(rl_on_ranks([&](const RlShared& shared, const DeviceMesh& mesh) {
    for (const auto& one : all_cases()) {
      for (const auto how : kRlAggregations) {
        const auto expected = [&] {
          const NoSpmd plain;
          return computed(one, terms, normalization(terms.mask, how));
        }();
        const PolicyTerms cut{shared(terms.logp).requires_grad_(), shared(terms.old_logp), shared(terms.advantages), shared(terms.mask),
                              shared(terms.weights)};
        const auto by = normalization(cut.mask, how);
        require(by.counts == rl::count(terms.mask), "test", "other counts");
        const CommDebugMode comm;
        const auto got = one.loss(cut, by);
        if (mesh.ndim() == 1) expect(comm, 0, one.name.c_str());  // sums of cut sequences are communicated
        got.loss.backward();
        rl_near(rl_item(got.loss), expected.loss, one.name);
        rl_near(cut.logp.grad(), rl_rows(expected.gradient), one.name + "'s gradient");
        rl_near(rl_item(got.metrics.clip_fraction), rl_item(expected.metrics.clip_fraction), one.name + "'s clip fraction");
      }
    }
  }));
}

TEST_CASE("rl losses: plain masks of ranks are counted over a mesh", "[rl]") {
  for (const std::string transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_ranks(
        4,
        [&](World& world) {
          const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "cp"});
          const auto own = rl_mask().roll(world.rank(), 0).narrow(0, 0, 2);
          rl::Counts expected;
          for (int rank = 0; rank < 4; ++rank) expected = expected + rl::count(rl_mask().roll(rank, 0).narrow(0, 0, 2));
          require(rl::count(own, mesh) == expected, "test", "other counts");
          require(rl::count({own, own}) == rl::count(own) + rl::count(own), "test", "other sums");
        },
        transport));
  }
}

TEST_CASE("rl losses: a critic's loss is that of loops", "[rl]") {
  const auto values = rl_numbers({6, 7}, 5), old_values = values + rl_numbers({6, 7}, 6, -0.5, 0.5), returns = rl_numbers({6, 7}, 7);
  const auto mask = rl_rows(rl_mask()), old = rl_rows(old_values), targets = rl_rows(returns);
  for (const double clip : {0.0, 0.2}) {
    for (const auto how : kRlAggregations) {
      double cut = 0, tokens = 0;
      const auto reference = [&](const RlComplexRows& v) {
        cut = tokens = 0;
        return 0.5 * rl_aggregated(mask, how, 9, [&](size_t b, size_t t) {
                 const auto free = v[b][t] - targets[b][t], bound = rl_clip(v[b][t], old[b][t] - clip, old[b][t] + clip) - targets[b][t];
                 cut += clip > 0 && std::abs(bound.real()) > std::abs(free.real());
                 tokens += 1;
                 return clip > 0 ? rl_larger(free * free, bound * bound) : free * free;
               });
      };
      const auto v = values.clone().requires_grad_();
      const auto got = rl::value_loss(v, clip > 0 ? old_values : at::Tensor(), returns, rl_mask(), normalization(rl_mask(), how), clip);
      got.loss.backward();
      CHECK_NOTHROW(rl_near(v.grad(), rl_gradient(rl_rows(values), reference), "the gradient"));
      CHECK_NOTHROW(rl_near(rl_item(got.loss), reference(rl_complex(rl_rows(values))).real(), "the loss"));
      CHECK_NOTHROW(rl_near(rl_item(got.clip_fraction), cut / tokens, "the clip fraction"));
      CHECK((cut > 0) == (clip > 0));
    }
  }
}

TEST_CASE("rl losses: positive examples are weighted by their tokens", "[rl]") {
  const auto logp = rl_numbers({6, 7}, 8, -3, 0);
  const auto right = torch::tensor({0, 1, 1, 1, 0, 0});
  const auto mask = rl::positive_mask(rl_mask(), right);
  double sum = 0, tokens = 0;
  for (const int b : {1, 2}) {
    for (size_t t = 0; t < 7; ++t) {
      if (rl_rows(rl_mask())[b][t] == 0) continue;
      sum -= rl_rows(logp)[b][t];
      tokens += 1;
    }
  }
  CHECK_NOTHROW(rl_near(rl_item(rl::positive_nll(logp, mask, rl::count(mask))), sum / tokens, "the loss"));
  const auto none = rl::positive_mask(rl_mask(), right * 0);
  CHECK(rl_item(rl::positive_nll(logp, none, rl::count(none))) == 0);
}

TEST_CASE("rl losses: what cannot work says so with its shapes", "[rl]") {
  const auto terms = policy_terms();
  const auto by = normalization(terms.mask);
  const auto with = [&](at::Tensor PolicyTerms::*member, const at::Tensor& value) {
    auto changed = terms;
    changed.*member = value;
    return changed;
  };
  CHECK_NOTHROW(refuses("[6, 7]", [&] { rl::ppo_loss(with(&PolicyTerms::old_logp, torch::zeros({6, 8})), by); }));
  CHECK_NOTHROW(refuses("an undefined tensor", [&] { rl::ppo_loss(with(&PolicyTerms::mask, {}), by); }));
  CHECK_NOTHROW(refuses("[42]", [&] { rl::gspo_loss(with(&PolicyTerms::logp, terms.logp.reshape({-1})), by); }));
  CHECK_NOTHROW(refuses("floating-point", [&] { rl::gpg_loss(with(&PolicyTerms::logp, terms.mask), by); }));
  CHECK_NOTHROW(refuses("empty after filtering", [&] { rl::ppo_loss(terms, {}); }));
  CHECK_NOTHROW(refuses("horizon", [&] { rl::gpg_loss(terms, {by.counts, Aggregation::sequence_mean_token_sum_norm}); }));
  CHECK_NOTHROW(refuses("dual_clip of 1", [&] { rl::ppo_loss(terms, by, {.dual_clip = 1}); }));
  CHECK_NOTHROW(refuses("clip_low -1", [&] { rl::cispo_loss(terms, by, {.clip_low = -1}); }));
  CHECK_NOTHROW(refuses("beta of 0", [&] { rl::dro_loss(terms, by, 0); }));
  CHECK_NOTHROW(refuses("tau_positive 0", [&] { rl::sapo_loss(terms, by, {.tau_positive = 0}); }));
  CHECK_NOTHROW(refuses("max_ratio of 0", [&] { rl::dppo_loss(terms, by, {.max_ratio = 0}); }));
  CHECK_NOTHROW(refuses("clip of -1", [&] { rl::value_loss(terms.logp, {}, terms.logp, terms.mask, by, -1); }));
  CHECK_NOTHROW(refuses("old_values", [&] { rl::value_loss(terms.logp, {}, terms.logp, terms.mask, by); }));
}
