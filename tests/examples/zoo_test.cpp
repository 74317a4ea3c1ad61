// Layers and models of the zoo on one device: sizes, names, formulas. zoo_parity_test.cpp trains them on meshes.
#include "tests/support/core_support.hpp"
#include "tests/support/sanitizers.hpp"

#include "examples/zoo/digits.hpp"
#include "examples/zoo/zoo.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/attention.hpp>
#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/nn/rms_norm.hpp>
#include <dtensor/nn/rotary_embedding.hpp>

#include <cmath>
#include <numbers>

using namespace dtensor;
using namespace dtensor::test;

namespace {

int64_t elements(const torch::nn::Module& module) {
  int64_t n = 0;
  for (const auto& p : module.parameters()) n += p.numel();
  for (const auto& b : module.named_buffers()) n += b.key().ends_with("feed_forward.bias") ? b->numel() : 0;  // of experts
  return n;
}

std::vector<std::string> names(const torch::nn::Module& module) {
  std::vector<std::string> result;
  for (const auto& item : module.named_parameters()) result.push_back(item.key());
  return result;
}

// Meta's reference, a frequency at a time.
double scaled_as_published(double frequency) {
  const double factor = 8, low = 1, high = 4, old_length = 8192;
  const double wave = 2 * std::numbers::pi / frequency;
  if (wave < old_length / high) return frequency;
  if (wave > old_length / low) return frequency / factor;
  const double smooth = (old_length / wave - low) / (high - low);
  return (1 - smooth) * frequency / factor + smooth * frequency;
}

const nn::RotaryOptions kLlama31{500000, nn::RotaryScaling{}};

}  // namespace

TEST_CASE("zoo: the models have the published numbers of parameters", "[zoo][slow]") {
  Alone alone(1);
  const auto mesh = init_device_mesh(c10::kCPU, {1}, {"dp"});
  for (const auto& entry : zoo::models()) {
    CAPTURE(entry.name);
    if (kSanitized && entry.parameters > 100'000'000'000) continue;  // whose random numbers take long to skip there
    const DeferredInit deferred(mesh);
    REQUIRE(elements(*entry.make()) == entry.parameters);
  }
  REQUIRE_THROWS_WITH(zoo::find("gpt3"), says("'gpt3'; the models are gpt2 "));
}

TEST_CASE("zoo: parameters have the names of the published checkpoints", "[zoo]") {
  const auto gpt2 = names(*zoo::find("gpt2-debug").make());
  REQUIRE(gpt2.size() == 2 + 2 * 12 + 2);  // no head of its own
  REQUIRE(std::vector(gpt2.begin(), gpt2.begin() + 6) ==
          std::vector<std::string>{"wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.ln_2.weight", "h.0.ln_2.bias"});
  const auto llama = names(*zoo::find("llama3-debug").make());
  REQUIRE(std::vector(llama.begin(), llama.begin() + 10) ==
          std::vector<std::string>{"tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.attention.wk.weight",
                                   "layers.0.attention.wv.weight", "layers.0.attention.wo.weight", "layers.0.feed_forward.w1.weight",
                                   "layers.0.feed_forward.w2.weight", "layers.0.feed_forward.w3.weight", "layers.0.attention_norm.weight",
                                   "layers.0.ffn_norm.weight"});
  REQUIRE(llama.back() == "output.weight");
  const auto mixtral = names(*zoo::find("mixtral-debug").make());
  REQUIRE(std::vector(mixtral.begin() + 5, mixtral.begin() + 9) ==
          std::vector<std::string>{"layers.0.feed_forward.gate.weight", "layers.0.feed_forward.experts.w1",
                                   "layers.0.feed_forward.experts.w2", "layers.0.feed_forward.experts.w3"});
}

TEST_CASE("zoo: an embedding that is the head is one tensor after construction without memory", "[zoo]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"tp"});
    const Spmd spmd(mesh);
    torch::manual_seed(0);
    std::shared_ptr<zoo::Model> model;
    {
      const DeferredInit deferred(mesh);
      model = zoo::find("gpt2-debug").make();
    }
    parallelize_module(*model, mesh, automatic_plan(*model, "tp", /*vocabulary=*/true));
    materialize(*model);
    const auto ids = torch::zeros({1, 4}, torch::kLong);
    const auto wte = model->named_parameters()["wte.weight"];
    require(DTensor(wte).to_local().size(0) == 128, "test", "the embedding is whole");
    model->forward(ids).sum().backward();
    // Row 1 is no input: what it gets, it gets as a row of the head.
    require(full_tensor(wte.grad())[1].abs().sum().item<double>() > 0, "test", "the head has no gradient");
  }));
}

TEST_CASE("zoo: the first loss is that of guessing", "[zoo]") {
  const auto ids = torch::arange(32).view({2, 16}), digits = torch::arange(2);
  for (const auto* name :
       {"gpt2-debug", "llama3-debug", "mixtral-debug", "qwen3-moe-debug", "deepseek-debug", "vit-debug", "resnest-debug"}) {
    CAPTURE(name);
    torch::manual_seed(0);
    const auto& entry = zoo::find(name);
    const auto input = entry.is_text() ? ids : torch::zeros({2, entry.channels, entry.image, entry.image});
    const auto scores = entry.make()->forward(input);
    REQUIRE(scores.sizes().vec() == (entry.is_text() ? std::vector<int64_t>{2, 16, 256} : std::vector<int64_t>{2, 10}));
    const double guessing = std::log(entry.is_text() ? 256.0 : 10.0);
    REQUIRE(zoo::loss(scores, entry.is_text() ? ids : digits).item<double>() == Approx(guessing).epsilon(0.15));
  }
}

TEST_CASE("zoo: digits", "[zoo]") {
  const zoo::Digits digits;
  REQUIRE(digits.size() == 1797);
  const auto [images, labels] = digits.batch(0, 3, 5, 3, 16);
  REQUIRE(images.sizes().vec() == std::vector<int64_t>{5, 3, 16, 16});
  REQUIRE(images.select(1, 0).equal(images.select(1, 2)));
  const auto [small, same_labels] = digits.batch(0, 3, 5, 1, 8);
  REQUIRE(small.equal(images.slice(1, 0, 1).slice(2, 0, 16, 2).slice(3, 0, 16, 2)));
  REQUIRE(labels.equal(same_labels));
  REQUIRE(small.min().item<float>() >= -1);
  REQUIRE(small.max().item<float>() == 1);
  REQUIRE_THROWS_WITH(zoo::Digits("/nonexistent/digits"), says("/nonexistent/digits"));
}

TEST_CASE("nn: rotary frequencies are scaled as published", "[nn]") {
  const auto plain = nn::rotary_frequencies(128, {500000}), scaled = nn::rotary_frequencies(128, kLlama31);
  int kept = 0, divided = 0;
  for (int i = 0; i < 64; ++i) {
    const double frequency = std::pow(500000.0, -2.0 * i / 128), expected = scaled_as_published(frequency);
    kept += expected == frequency;
    divided += expected == frequency / 8;
    REQUIRE(plain[i].item<double>() == Approx(frequency).epsilon(1e-13));
    REQUIRE(scaled[i].item<double>() == Approx(expected).epsilon(1e-13));
  }
  REQUIRE((kept > 0 && divided > 0 && kept + divided < 64));
  REQUIRE_THROWS_WITH(nn::rotary_frequencies(7, {}), says("got 7"));
}

TEST_CASE("nn: rotary embeddings are complex products", "[nn]") {
  torch::manual_seed(0);
  const auto x = torch::randn({2, 5, 3, 8}, torch::kDouble);
  const auto table = nn::rotary_table(5, 8, kLlama31, x);
  const auto angles = torch::arange(5, torch::kDouble).outer(nn::rotary_frequencies(8, kLlama31));
  const auto turns = torch::polar(torch::ones({5, 4}, torch::kDouble), angles);
  const auto expected = torch::view_as_real(torch::view_as_complex(x.view({2, 5, 3, 4, 2})) * turns.unsqueeze(1)).flatten(-2);
  REQUIRE(nn::apply_rotary(x, table).allclose(expected, 1e-12, 1e-12));
  REQUIRE(nn::apply_rotary(x.to(torch::kBFloat16), table).scalar_type() == torch::kBFloat16);
  REQUIRE_THROWS_WITH(nn::apply_rotary(x, nn::rotary_table(4, 8, {}, x)), says("expected [5, 4]"));
}

TEST_CASE("nn: grouped queries are as keys and values repeated", "[nn]") {
  torch::manual_seed(0);
  nn::GroupedQueryAttention grouped(nn::GroupedQueryAttentionOptions{24, 6, 2}), whole(nn::GroupedQueryAttentionOptions{24, 6, 6});
  grouped->to(torch::kDouble), whole->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    const auto repeated = [](const at::Tensor& weight) { return weight.view({2, 1, 4, 24}).expand({2, 3, 4, 24}).reshape({24, 24}); };
    whole->wq->weight.copy_(grouped->wq->weight);
    whole->wo->weight.copy_(grouped->wo->weight);
    whole->wk->weight.copy_(repeated(grouped->wk->weight));
    whole->wv->weight.copy_(repeated(grouped->wv->weight));
  }
  const auto x = torch::randn({2, 7, 24}, torch::kDouble);
  const auto table = nn::rotary_table(7, 4, kLlama31, x);
  const auto y = grouped(x, table);
  REQUIRE(y.allclose(whole(x, table), 1e-12, 1e-12));
  // Causal: what comes later changes nothing.
  auto other = x.clone();
  other.slice(1, 4).zero_();
  REQUIRE(grouped(other, table).slice(1, 0, 4).allclose(y.slice(1, 0, 4), 1e-12, 1e-12));
  REQUIRE_THROWS_WITH(nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{24, 6, 4}), says("got 6 and 4"));
}

TEST_CASE("nn: attention without a mask attends to all", "[nn]") {
  torch::manual_seed(0);
  const auto q = torch::randn({2, 3, 5, 4}, torch::kDouble), k = torch::randn_like(q), v = torch::randn_like(q);
  const auto expected = (q.matmul(k.transpose(-1, -2)) / 2).softmax(-1).matmul(v);
  REQUIRE(nn::attention(q, k, v).allclose(expected, 1e-12, 1e-12));
  REQUIRE(nn::attention(q, k, v, {true}).select(2, 0).allclose(v.select(2, 0), 1e-12, 1e-12));
}

TEST_CASE("nn: the root mean square is taken in float32", "[nn]") {
  torch::manual_seed(0);
  nn::RMSNorm norm(16, 1e-6);
  const auto x = torch::randn({3, 16}) * 1000;
  const auto expected = x / (x.square().mean(-1, true) + 1e-6).sqrt();
  REQUIRE(norm(x).allclose(expected, 1e-5, 1e-5));
  norm->to(torch::kHalf);
  const auto half = norm(x.to(torch::kHalf));  // whose squares are infinite
  REQUIRE(half.scalar_type() == torch::kHalf);
  REQUIRE(half.to(torch::kFloat).allclose(expected, 1e-2, 1e-2));
}
