// A small model of text, and what a decoder should make of it, by the model's own forward alone.
#pragma once

#include "tests/support/core_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/generate/engine.hpp>
#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/nn/position_rows.hpp>
#include <dtensor/nn/rms_norm.hpp>
#include <dtensor/nn/swiglu.hpp>

#include <fmt/ranges.h>
#include <torch/torch.h>

#include <random>

namespace dtensor::test {

constexpr int64_t kVocabulary = 23;

// Ids [batch, length] -> scores [batch, length, kVocabulary]: learned and rotary positions, two layers, grouped heads.
struct SmallText : torch::nn::Module {
  explicit SmallText(uint64_t seed = 3, at::ScalarType dtype = at::kDouble, int64_t places_of = 96) {
    torch::manual_seed(seed);
    words = register_module("words", torch::nn::Embedding(kVocabulary, 16));
    places = register_module("places", torch::nn::Embedding(places_of, 16));
    for (int i = 0; i < 2; ++i) {
      attention.push_back(
          register_module(fmt::format("attention{}", i), nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{16, 4, 2})));
      hidden.push_back(register_module(fmt::format("hidden{}", i), nn::SwiGLU(16, 32)));
    }
    norm = register_module("norm", nn::RMSNorm(16));
    head = register_module("head", torch::nn::Linear(16, kVocabulary));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : parameters()) parameter.mul_(3);  // so that tokens are not alike
    }
    to(dtype);
  }

  at::Tensor forward(const at::Tensor& ids) { return head(norm(nn::scored_rows(body(ids)))); }

  // All but the head.
  at::Tensor body(const at::Tensor& ids) {
    auto x = words(ids) + nn::position_rows(places->weight, ids.size(1));
    const auto table = nn::rotary_table(ids.size(1), 4, {}, x);
    for (size_t i = 0; i < attention.size(); ++i) {
      x = x + attention[i](at::layer_norm(x, {16}), table);
      x = x + hidden[i](at::layer_norm(x, {16}));
    }
    return x;
  }

  torch::nn::Embedding words{nullptr}, places{nullptr};
  std::vector<nn::GroupedQueryAttention> attention;
  std::vector<nn::SwiGLU> hidden;
  nn::RMSNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};

inline std::vector<generate::Tokens> some_prompts(int64_t count, uint64_t seed = 1, int64_t longest = 40) {
  std::mt19937_64 random(seed);
  std::vector<generate::Tokens> prompts;
  for (int64_t i = 0; i < count; ++i) {
    generate::Tokens prompt;
    if (i % 3 == 2) prompt.assign(prompts[i - 1].begin(), prompts[i - 1].end());  // begins alike
    const auto length =
        std::max<int64_t>(static_cast<int64_t>(prompt.size()) / 2 + 1, 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(longest)));
    prompt.resize(length, 0);
    for (auto j = i % 3 == 2 ? length * 2 / 3 : 0; j < length; ++j) prompt[j] = static_cast<int64_t>(random() % kVocabulary);
    prompts.push_back(prompt);
  }
  return prompts;
}

// Token after token, each from the scores of the whole sequence.
template <class Model>
generate::Output decode_slowly(Model& model, const generate::Tokens& prompt, const generate::Settings& settings, int64_t index = 0) {
  const torch::NoGradGuard no_grad;
  generate::Output output;
  auto tokens = prompt;
  for (int64_t i = 0; i < settings.max_tokens; ++i) {
    const auto ids = torch::tensor(tokens, at::kLong).unsqueeze(0);
    const auto scores = model.forward(ids)[0][-1].to(at::kDouble).contiguous();
    const std::span<const double> row(scores.template data_ptr<double>(), scores.numel());
    const generate::Distribution distribution(row, settings, tokens, static_cast<int64_t>(prompt.size()));
    const auto token = distribution.draw(generate::uniform_of(settings.seed, index, static_cast<int64_t>(tokens.size())));
    output.logprobs.push_back(scores.log_softmax(-1)[token].template item<double>());
    tokens.push_back(token);
    output.tokens.push_back(token);
    if (std::ranges::find(settings.stop_tokens, token) != settings.stop_tokens.end()) break;
  }
  return output;
}

inline void require_same(const generate::Output& a, const generate::Output& b, const std::string& what) {
  if (a.tokens != b.tokens) fail("test", "{}: got tokens {}; expected {}", what, fmt::join(a.tokens, " "), fmt::join(b.tokens, " "));
  for (size_t i = 0; i < a.logprobs.size(); ++i) {
    if (std::abs(a.logprobs[i] - b.logprobs[i]) > 1e-9)
      fail("test", "{}: log-probability {} is {}; expected {}", what, i, a.logprobs[i], b.logprobs[i]);
  }
}

}  // namespace dtensor::test
