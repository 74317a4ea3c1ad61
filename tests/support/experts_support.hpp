// What the tests of experts share: inputs, a mixture of experts one token after the other, and gradients of a layer.
#pragma once

#include "tests/support/core_support.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/parallel/expert/mix.hpp>

#include <torch/torch.h>

#include <string>
#include <vector>

namespace dtensor::test::experts {

// Plain operands of mix_experts. Random, but the same on every rank.
struct MixCase {
  at::Tensor x, chosen, weights, w1, w2, w3;
  std::vector<at::Tensor> leaves() const { return w3.defined() ? std::vector{x, weights, w1, w2, w3} : std::vector{x, weights, w1, w2}; }
  expert::Weights experts() const { return {w1, w2, w3}; }
};

struct MixSizes {
  std::vector<int64_t> tokens{4, 6};
  int64_t dim = 5, hidden = 7, experts = 6, k = 2;
};

inline MixCase mix_case(const MixSizes& s = {}, bool gated = true, at::ScalarType dtype = at::kDouble, int seed = 1) {
  const NoSpmd plain;
  torch::manual_seed(seed);
  const auto random = [&](std::vector<int64_t> sizes) { return torch::randn(sizes, dtype).requires_grad_(); };
  auto with = [&](int64_t last) {
    auto sizes = s.tokens;
    sizes.push_back(last);
    return sizes;
  };
  MixCase c;
  c.x = random(with(s.dim));
  c.chosen = std::get<1>(torch::randn(with(s.experts)).topk(s.k));
  c.weights = torch::rand(with(s.k), dtype).requires_grad_();
  c.w1 = random({s.experts, s.hidden, s.dim}), c.w2 = random({s.experts, s.dim, s.hidden});
  if (gated) c.w3 = random({s.experts, s.hidden, s.dim});
  return c;
}

// One token and one choice after the other.
inline at::Tensor mix_by_token(const MixCase& c) {
  const auto x = c.x.reshape({-1, c.x.size(-1)}), weights = c.weights.reshape({-1, c.weights.size(-1)});
  const auto chosen = c.chosen.reshape({-1, c.chosen.size(-1)});
  std::vector<at::Tensor> all;
  for (int64_t t = 0; t < x.size(0); ++t) {
    auto y = torch::zeros_like(x[t]);
    for (int64_t j = 0; j < chosen.size(1); ++j) {
      const auto e = chosen[t][j].item<int64_t>();
      if (e < 0) continue;
      const auto first = torch::mv(c.w1[e], x[t]);
      const auto hidden = c.w3.defined() ? first * torch::sigmoid(first) * torch::mv(c.w3[e], x[t])
                                         : 0.5 * first * (1 + torch::erf(first / std::sqrt(2.0)));
      y = y + weights[t][j] * torch::mv(c.w2[e], hidden);
    }
    all.push_back(y);
  }
  return torch::stack(all).view(c.x.sizes());
}

// Numbers to weigh results with, so that gradients differ everywhere.
inline at::Tensor weighing(const at::Tensor& like) {
  const NoSpmd plain;
  return torch::arange(like.numel(), at::kDouble).mul(0.37).sin().view(like.sizes()).to(like.scalar_type());
}

// The result and the gradients of the leaves, plain and whole.
struct MixResult {
  at::Tensor y;
  std::vector<at::Tensor> gradients;
};

inline MixResult result_of(const at::Tensor& y, const std::vector<at::Tensor>& leaves) {
  (y * weighing(y)).sum().backward();
  MixResult result{full_tensor(y.detach()), {}};
  for (const auto& leaf : leaves) result.gradients.push_back(full_tensor(leaf.grad()));
  return result;
}

inline MixResult one_device(const MixCase& given, const MixOptions& options = {}) {
  auto c = given;
  for (auto* leaf : {&c.x, &c.weights, &c.w1, &c.w2, &c.w3}) {
    if (leaf->defined()) *leaf = leaf->detach().clone().requires_grad_();
  }
  return result_of(mix_experts(c.x, c.chosen, c.weights, c.experts(), options), c.leaves());
}

// The same on a mesh, with tokens and weights laid out so.
inline MixResult on_mesh(const MixCase& given, const DeviceMesh& mesh, const Placements& tokens, const Placements& w1,
                         const MixOptions& options = {}) {
  auto w2 = w1;
  for (auto& placement : w2) {
    if (placement.is_shard(1)) placement = shard(2);
  }
  const auto lay = [&](const at::Tensor& x, const Placements& placements) {
    return x.defined() ? distribute_tensor(x.detach(), mesh, placements).tensor().requires_grad_(x.is_floating_point()) : x;
  };
  const MixCase c{lay(given.x, tokens), lay(given.chosen, tokens), lay(given.weights, tokens), lay(given.w1, w1), lay(given.w2, w2),
                  lay(given.w3, w1)};
  const Spmd spmd(mesh);
  return result_of(mix_experts(c.x, c.chosen, c.weights, c.experts(), options), c.leaves());
}

// Throws where they differ by more than so much of the largest number; 0: in any bit.
inline void check_same(const MixResult& got, const MixResult& expected, double tolerance, const std::string& what) {
  const NoSpmd plain;
  const auto check = [&](const at::Tensor& a, const at::Tensor& b, const std::string& name) {
    const auto difference = (a - b).abs().max().item<double>(), largest = b.abs().max().item<double>();
    const bool same = tolerance == 0 ? a.equal(b) : difference <= tolerance * std::max(1.0, largest);
    require(same, "test", "{}: {} differs by {}", what, name, difference);
  };
  check(got.y, expected.y, "the result");
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    check(got.gradients[i], expected.gradients[i], "gradient " + std::to_string(i));
  }
}

}  // namespace dtensor::test::experts
