// What tests of RL share: a batch with holes in its mask, numbers as plain rows, derivatives by complex steps.
#pragma once

#include "tests/support/dispatch_support.hpp"

#include <dtensor/rl/aggregate.hpp>

#include <complex>
#include <functional>
#include <numeric>
#include <vector>

namespace dtensor::test {

using RlNumber = std::complex<double>;
using RlRow = std::vector<double>;
using RlRows = std::vector<RlRow>;
using RlComplexRows = std::vector<std::vector<RlNumber>>;

// Numbers in (from, to) that look random.
inline at::Tensor rl_numbers(std::vector<int64_t> sizes, int seed, double from = -1, double to = 1) {
  int64_t count = 1;
  for (const auto size : sizes) count *= size;
  const auto x = (torch::arange(count, torch::kDouble) * 12.9898 + 78.233 * seed + 0.1).sin() * 43758.5453;
  return ((x - x.floor()) * (to - from) + from).reshape(sizes);
}

inline RlRows rl_rows(const at::Tensor& x) {
  const auto plain = full_tensor(x.detach()).to(torch::kDouble).contiguous();
  RlRows rows(plain.size(0), RlRow(plain.size(1)));
  for (int64_t b = 0; b < plain.size(0); ++b) {
    for (int64_t t = 0; t < plain.size(1); ++t) rows[b][t] = plain.data_ptr<double>()[b * plain.size(1) + t];
  }
  return rows;
}

inline RlRow rl_row(const at::Tensor& x) { return rl_rows(x.reshape({1, -1}))[0]; }

// [6, 7]: whole, cut short, with holes, empty, one token, starting late.
inline at::Tensor rl_mask() {
  return torch::tensor(
             {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1},
             torch::kLong)
      .reshape({6, 7});
}

inline void rl_near(double got, double expected, const std::string& what, double bound = 1e-12) {
  require(std::abs(got - expected) <= bound * std::max(1.0, std::abs(expected)), "test", "{}: got {:.17g}; expected {:.17g}", what, got,
          expected);
}

inline void rl_near(const at::Tensor& got, const RlRows& expected, const std::string& what, double bound = 1e-12) {
  const auto rows = rl_rows(got);
  require(rows.size() == expected.size() && rows[0].size() == expected[0].size(), "test", "{}: other sizes", what);
  for (size_t b = 0; b < rows.size(); ++b) {
    for (size_t t = 0; t < rows[b].size(); ++t) rl_near(rows[b][t], expected[b][t], fmt::format("{} at {}, {}", what, b, t), bound);
  }
}

inline double rl_item(const at::Tensor& x) { return full_tensor(x.detach()).to(torch::kDouble).item<double>(); }

inline RlComplexRows rl_complex(const RlRows& x) {
  RlComplexRows z;
  for (const auto& row : x) z.emplace_back(row.begin(), row.end());
  return z;
}

// The gradient of a function of rows, exact to rounding: Im f(x + ih) / h for a tiny h (Squire and Trapp, "Using Complex Variables to
// Estimate Derivatives of Real Functions", 1998).
template <class F>
RlRows rl_gradient(const RlRows& x, F f) {
  constexpr double h = 1e-30;
  auto z = rl_complex(x);
  RlRows gradient = x;
  for (size_t b = 0; b < x.size(); ++b) {
    for (size_t t = 0; t < x[b].size(); ++t) {
      z[b][t] = {x[b][t], h};
      gradient[b][t] = f(z).imag() / h;
      z[b][t] = x[b][t];
    }
  }
  return gradient;
}

inline RlNumber rl_smaller(RlNumber a, RlNumber b) { return a.real() <= b.real() ? a : b; }
inline RlNumber rl_larger(RlNumber a, RlNumber b) { return a.real() >= b.real() ? a : b; }
inline RlNumber rl_clip(RlNumber x, double low, double high) { return rl_larger(low, rl_smaller(x, high)); }

// A loss of tokens, aggregated by loops. `value(b, t)` is called only where the mask holds.
template <class F>
RlNumber rl_aggregated(const RlRows& mask, rl::Aggregation how, double horizon, F value) {
  RlNumber sum = 0;
  double tokens = 0, sequences = 0;
  for (size_t b = 0; b < mask.size(); ++b) {
    RlNumber own = 0;
    double length = 0;
    for (size_t t = 0; t < mask[b].size(); ++t) {
      if (mask[b][t] == 0) continue;
      own += value(b, t);
      length += 1;
    }
    tokens += length;
    sequences += length > 0;
    if (length > 0) sum += how == rl::Aggregation::sequence_mean_token_mean ? own / length : own;
  }
  switch (how) {
    case rl::Aggregation::token_mean: return sum / tokens;
    case rl::Aggregation::token_sum: return sum;
    case rl::Aggregation::sequence_mean_token_sum_norm: return sum / sequences / horizon;
    default: return sum / sequences;
  }
}

inline constexpr rl::Aggregation kRlAggregations[] = {rl::Aggregation::token_mean, rl::Aggregation::token_sum,
                                                      rl::Aggregation::sequence_mean_token_mean, rl::Aggregation::sequence_mean_token_sum,
                                                      rl::Aggregation::sequence_mean_token_sum_norm};

inline at::Tensor rl_trained_logp() { return rl_numbers({6, 7}, 1, -3, -0.1); }
inline at::Tensor rl_rollout_logp() { return rl_trained_logp() + rl_numbers({6, 7}, 2, -0.8, 0.8); }
inline double rl_sum(const RlRow& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

// Answers to three prompts, mixed; the fifth is alone. Its row is the one that the mask holds from its sixth token on.
inline at::Tensor rl_group_numbers() { return torch::tensor({70, -3, 70, -3, 5, 70}, torch::kLong); }
inline at::Tensor rl_scores() { return torch::tensor({1.0, 0.25, 0.0, 0.75, 2.0, 0.5}, torch::kDouble); }

// The indices of the tokens that count.
inline std::vector<size_t> rl_tokens_of(const RlRow& mask) {
  std::vector<size_t> tokens;
  for (size_t t = 0; t < mask.size(); ++t) {
    if (mask[t] != 0) tokens.push_back(t);
  }
  return tokens;
}

inline RlRows rl_whitened(RlRows x, const RlRows& mask) {
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

// Runs `body` on 1 to 4 ranks over threads, and on 3 over gloo: `shared(x)` gives a plain tensor with its first dim cut among all ranks.
// And on 2 x 2 ranks that cut the first dim and the second.
using RlShared = std::function<at::Tensor(const at::Tensor&)>;
inline void rl_on_ranks(const std::function<void(const RlShared& shared, const DeviceMesh& mesh)>& body) {
  const auto run = [&](std::vector<int64_t> sizes, const std::string& transport) {
    const auto ranks = static_cast<int>(std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>()));
    on_ranks(
        ranks,
        [&](World&) {
          const auto mesh = init_device_mesh(torch::kCPU, sizes,
                                             sizes.size() == 1 ? std::vector<std::string>{"dp"} : std::vector<std::string>{"dp", "cp"});
          const Spmd spmd(mesh);
          body(
              [&](const at::Tensor& x) {
                if (!x.defined()) return x;
                Placements placements{shard(0)};
                if (mesh.ndim() == 2) placements.push_back(x.dim() == 2 ? shard(1) : replicate());
                return distribute_tensor(x, mesh, placements).tensor().detach();
              },
              mesh);
        },
        transport);
  };
  for (const int ranks : {1, 2, 3, 4}) run({ranks}, "threads");
  run({3}, "gloo");
  run({2, 2}, "threads");
}

// A function of whole batches is the same on ranks, with everything cut by rows.
using RlOfBatch = std::function<std::vector<at::Tensor>(const RlShared& shared)>;
inline void rl_same_on_ranks(const std::string& name, const RlOfBatch& f, double bound = 1e-12) {
  std::vector<RlRows> expected;
  for (const auto& x : f([](const at::Tensor& x) { return x; })) expected.push_back(rl_rows(x));
  rl_on_ranks([&](const RlShared& shared, const DeviceMesh&) {
    const auto got = f(shared);
    for (size_t i = 0; i < got.size(); ++i) rl_near(got[i], expected[i], name, bound);
  });
}

}  // namespace dtensor::test
