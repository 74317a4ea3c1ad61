// Latent attention, heads that are normalized, and YaRN: their formulas, written in another way.
#include "tests/support/core_support.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/nn/latent_attention.hpp>

#include <torch/torch.h>

#include <cmath>
#include <numbers>

namespace dtensor::test::latent {

namespace {

// DeepSeek's find_correction_range and what follows, a frequency at a time.
double yarn_as_published(int64_t i, int64_t dim, double base, const nn::YarnScaling& o) {
  const auto correction = [&](double rotations) {
    return static_cast<double>(dim) * std::log(static_cast<double>(o.original_length) / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(base));
  };
  const double low = std::max(std::floor(correction(o.fast)), 0.0);
  const double high = std::min(std::ceil(correction(o.slow)), static_cast<double>(dim - 1));
  const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
  const double frequency = 1 / std::pow(base, 2.0 * static_cast<double>(i) / static_cast<double>(dim)), smooth = 1 - ramp;
  return frequency / o.factor * (1 - smooth) + frequency * smooth;
}

at::Tensor normalized(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x / (x.square().mean(-1, true) + eps).sqrt() * weight;
}

// Pairs of neighbours as complex numbers: x [batch, length, dim].
at::Tensor rotated(const at::Tensor& x, const at::Tensor& frequencies) {
  const auto angles = torch::arange(x.size(1), torch::kDouble).outer(frequencies);
  const auto turns = torch::polar(torch::ones_like(angles), angles);
  return torch::view_as_real(torch::view_as_complex(x.reshape({x.size(0), x.size(1), -1, 2}).contiguous()) * turns).flatten(-2);
}

at::Tensor causal(const at::Tensor& scores) {
  return scores.masked_fill(torch::ones({scores.size(-2), scores.size(-1)}, torch::kBool).triu(1), -INFINITY).softmax(-1);
}

// A head at a time, by scores of queries with the short vectors themselves: keys and values are never made.
at::Tensor absorbed(nn::LatentAttentionImpl& m, const nn::LatentAttentionOptions& o, const at::Tensor& x, const at::Tensor& frequencies) {
  const auto queries =
      m.wq ? x.matmul(m.wq->weight.t()) : normalized(x.matmul(m.wq_a->weight.t()), m.q_norm->weight, o.eps).matmul(m.wq_b->weight.t());
  const auto made = x.matmul(m.wkv_a->weight.t());
  const auto latent = normalized(made.slice(-1, 0, o.kv_rank), m.kv_norm->weight, o.eps);
  const auto placed = rotated(made.slice(-1, o.kv_rank), frequencies);
  const auto dim = o.nope_dim + o.rope_dim;
  std::vector<at::Tensor> heads;
  for (int64_t h = 0; h < o.heads; ++h) {
    const auto q = queries.slice(-1, h * dim, (h + 1) * dim);
    const auto own = m.wkv_b->weight.slice(0, h * (o.nope_dim + o.value_dim), (h + 1) * (o.nope_dim + o.value_dim));
    const auto scores = q.slice(-1, 0, o.nope_dim).matmul(own.slice(0, 0, o.nope_dim)).matmul(latent.transpose(1, 2)) +
                        rotated(q.slice(-1, o.nope_dim), frequencies).matmul(placed.transpose(1, 2));
    const auto mixed = causal(scores * (o.scale / std::sqrt(static_cast<double>(dim)))).matmul(latent);
    heads.push_back(mixed.matmul(own.slice(0, o.nope_dim).t()));
  }
  return torch::cat(heads, -1).matmul(m.wo->weight.t());
}

nn::LatentAttentionOptions options_of(int64_t q_rank) {
  return {.dim = 20, .heads = 4, .q_rank = q_rank, .kv_rank = 7, .nope_dim = 6, .rope_dim = 4, .value_dim = 5, .scale = 1.5};
}

}  // namespace

TEST_CASE("nn: YaRN stretches frequencies as published", "[nn]") {
  const nn::YarnScaling yarn;
  const nn::RotaryOptions options{10000, {}, yarn};
  const auto frequencies = nn::rotary_frequencies(64, options);
  for (int64_t i = 0; i < 32; ++i) CHECK(frequencies[i].item<double>() == Approx(yarn_as_published(i, 64, 10000, yarn)).epsilon(1e-13));
  CHECK(frequencies[0].item<double>() == 1);
  CHECK(frequencies[31].item<double>() == Approx(std::pow(10000, -62.0 / 64) / 40).epsilon(1e-13));
  CHECK(nn::yarn_attention_scale(options) == Approx(std::pow(0.1 * std::log(40.0) + 1, 2)).epsilon(1e-15));
  CHECK(nn::yarn_attention_scale({}) == 1);
}

TEST_CASE("nn: latent attention is that of its short vectors", "[nn]") {
  for (const int64_t q_rank : {0, 9}) {
    torch::manual_seed(0);
    const auto o = options_of(q_rank);
    nn::LatentAttention attention(o);
    attention->to(torch::kDouble);
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : attention->parameters()) p.add_(torch::randn_like(p), 0.3);
    }
    const auto x = torch::randn({2, 7, 20}, torch::kDouble).requires_grad_();
    const nn::RotaryOptions rotary{10000, {}, nn::YarnScaling{4, 32, 1, 16}};
    const auto y = attention(x, nn::rotary_table(7, 4, rotary, x));
    const auto expected = absorbed(*attention, o, x, nn::rotary_frequencies(4, rotary));
    CHECK(y.allclose(expected, 1e-12, 1e-12));
    auto wanted = attention->parameters();
    wanted.push_back(x);
    const auto weights = torch::randn_like(y);
    const auto got = torch::autograd::grad({(y * weights).sum()}, wanted);
    const auto other = torch::autograd::grad({(expected * weights).sum()}, wanted);
    for (size_t i = 0; i < got.size(); ++i) CHECK(got[i].allclose(other[i], 1e-11, 1e-11));
  }
  auto longer = options_of(0);
  longer.value_dim = 11;
  CHECK_THROWS_WITH(nn::LatentAttention(longer), says("got 11 and 10"));
}

TEST_CASE("nn: heads of queries and keys are normalized", "[nn]") {
  torch::manual_seed(0);
  nn::GroupedQueryAttention m(nn::GroupedQueryAttentionOptions{.dim = 12, .heads = 4, .kv_heads = 2, .head_dim = 6, .norm_eps = 1e-6});
  m->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (auto& p : m->parameters()) p.add_(torch::randn_like(p), 0.3);
  }
  const auto x = torch::randn({2, 5, 12}, torch::kDouble);
  const auto frequencies = nn::rotary_frequencies(6, {});
  std::vector<at::Tensor> heads;
  for (int64_t h = 0; h < 4; ++h) {
    const auto of_head = [&](const torch::nn::Linear& layer, int64_t head) {
      return x.matmul(layer->weight.slice(0, head * 6, (head + 1) * 6).t());
    };
    const auto q = rotated(normalized(of_head(m->wq, h), m->q_norm->weight, 1e-6), frequencies);
    const auto k = rotated(normalized(of_head(m->wk, h / 2), m->k_norm->weight, 1e-6), frequencies);
    heads.push_back(causal(q.matmul(k.transpose(1, 2)) / std::sqrt(6.0)).matmul(of_head(m->wv, h / 2)));
  }
  CHECK(m(x, nn::rotary_table(5, 6, {}, x)).allclose(torch::cat(heads, -1).matmul(m->wo->weight.t()), 1e-12, 1e-12));
}

TEST_CASE("nn: the automatic plan of latent attention cuts heads and leaves the short vectors whole", "[nn][parallel]") {
  const auto names_of = [](const nn::LatentAttentionOptions& sizes) {
    nn::LatentAttention attention(sizes);
    const auto holder = std::make_shared<torch::nn::Module>();
    holder->register_module("embedding", torch::nn::Embedding(3, sizes.dim));
    holder->register_module("attention", attention);
    std::string names;
    for (const auto& entry : automatic_plan(*holder)) {
      if (entry.pattern.ends_with("weight")) names += entry.pattern + (entry.placements[0].second == shard(0) ? " 0 " : " 1 ");
    }
    return names;
  };
  const std::string of_short = "attention.wq_b.weight 0 attention.wkv_b.weight 0 attention.wo.weight 1 ";
  const std::string of_input = "attention.wq.weight 0 attention.wkv_b.weight 0 attention.wo.weight 1 ";
  for (const int64_t value_dim : {4, 5}) {  // heads of 16 values in all, or of as many as the width
    auto o = options_of(9), without = options_of(0);
    o.value_dim = without.value_dim = value_dim;
    CHECK(names_of(o) == of_short);
    CHECK(names_of(without) == of_input);
    o.q_rank = 15;
    CHECK(names_of(o) == of_short);
  }
}

}  // namespace dtensor::test::latent
