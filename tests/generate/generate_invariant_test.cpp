// Passes whose bits do not depend on what shares the batch, and log-probabilities that are training's.
#include "tests/support/generate_support.hpp"

#include <dtensor/generate/batch_invariant.hpp>

using namespace dtensor;
using namespace dtensor::test;
using generate::BatchInvariant;
using generate::Engine;
using generate::Settings;
using generate::Tokens;

namespace {

// The log-probabilities of an output by one forward as training does it, in the dtype of the model, and the gradient's size.
std::vector<double> by_training(SmallText& model, const Tokens& prompt, const Tokens& output) {
  auto all = prompt;
  all.insert(all.end(), output.begin(), output.end());
  const BatchInvariant region;
  auto ids = torch::tensor(all, at::kLong).unsqueeze(0);
  if (const auto* mesh = Spmd::current()) ids = distribute_tensor(ids, *mesh, Placements(mesh->ndim(), replicate()));
  const auto scores = full_tensor(model.forward(ids));
  const NoSpmd plain;
  const auto logprobs = scores.detach()[0].log_softmax(-1);
  std::vector<double> of_output;
  for (size_t i = 0; i < output.size(); ++i)
    of_output.push_back(logprobs[static_cast<int64_t>(prompt.size() + i) - 1][output[i]].item<double>());
  return of_output;
}

}  // namespace

TEST_CASE("generate invariant: products equal the formula and do not depend on the number of rows", "[generate]") {
  torch::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const auto& [rows, outputs, k] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {7, 9, 33}, {16, 64, 256}, {5, 3, 16}, {33, 20, 100}}) {
      CAPTURE(c10::toString(dtype), rows, outputs, k);
      const auto x = torch::randn({rows, k}, at::kDouble).to(dtype), w = torch::randn({outputs, k}, at::kDouble).to(dtype);
      const auto y = generate::rows_product(x, w);
      CHECK(y.scalar_type() == dtype);
      const auto expected = x.to(at::kDouble).mm(w.to(at::kDouble).t());
      CHECK((y.to(at::kDouble) - expected).abs().max().item<double>() < (dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-4 : 0.3));
      for (int64_t row = 0; row < rows; ++row) CHECK(generate::rows_product(x.narrow(0, row, 1), w).equal(y.narrow(0, row, 1)));
      for (int64_t out = 0; out < outputs; ++out) CHECK(generate::rows_product(x, w.narrow(0, out, 1)).equal(y.narrow(1, out, 1)));
    }
  }
  auto x = torch::randn({3, 5}, at::kDouble).requires_grad_(), w = torch::randn({4, 5}, at::kDouble).requires_grad_();
  const auto weights = torch::randn({3, 4}, at::kDouble);
  (generate::rows_product(x, w) * weights).sum().backward();
  CHECK(x.grad().allclose(weights.mm(w.detach()), 1e-12, 1e-12));
  CHECK(w.grad().allclose(weights.t().mm(x.detach()), 1e-12, 1e-12));
  CHECK_THROWS(generate::rows_product(torch::zeros({2, 3}), torch::zeros({2, 4})));
}

TEST_CASE("generate invariant: a row of a product has the same bits alone by whichever operator", "[generate]") {
  torch::manual_seed(2);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto x = torch::randn({2, 17, 100}, dtype), w = torch::randn({30, 100}, dtype), bias = torch::randn({30}, dtype);
    const std::vector<std::function<at::Tensor(const at::Tensor&)>> ways{
        [&](const at::Tensor& a) { return torch::nn::functional::linear(a, w, bias); },
        [&](const at::Tensor& a) { return torch::nn::functional::linear(a.flatten(0, 1), w, bias); },  // addmm
        [&](const at::Tensor& a) { return at::linear(a, w, bias); }, [&](const at::Tensor& a) { return at::matmul(a, w.t()).add(bias); },
        [&](const at::Tensor& a) { return at::mm(a.flatten(0, 1), w.t().contiguous()).add(bias); }};
    const BatchInvariant region;
    const auto expected = ways[0](x).flatten(0, 1);
    for (const auto& way : ways) {
      CHECK(way(x).flatten(0, -2).equal(expected));
      for (int64_t row = 0; row < 34; ++row) CHECK(way(x[row / 17][row % 17].view({1, 1, 100})).flatten(0, -2)[0].equal(expected[row]));
    }
    CHECK(at::addmm(bias, x[0], w.t(), 2, 3).allclose(bias * 2 + x[0].mm(w.t()) * 3, 1e-4, 1e-4));
    CHECK_THROWS(at::mm(x[0], w));
    CHECK_THROWS(at::matmul(x, w));
  }
}

TEST_CASE("generate invariant: any number of rows and outputs", "[generate]") {
  torch::manual_seed(6);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t k : {1, 16, 37, 64}) {
      const auto x = torch::randn({13, k}).to(dtype), w = torch::randn({19, k}).to(dtype);
      const auto exact = at::mm(x.to(at::kDouble), w.to(at::kDouble).t());
      const std::vector<std::pair<int64_t, int64_t>> sizes{{0, 19}, {1, 19}, {2, 8}, {3, 17}, {4, 9},  {5, 19},
                                                           {6, 7},  {7, 8},  {8, 12}, {9, 19}, {12, 4}, {13, 19}};
      for (const auto& [rows, outputs] : sizes) {
        const auto got = generate::rows_product(x.narrow(0, 0, rows), w.narrow(0, 0, outputs));
        const auto bound = dtype == at::kBFloat16 ? 0.1 : dtype == at::kFloat ? 1e-4 : 1e-12;
        CHECK(got.to(at::kDouble).allclose(exact.narrow(0, 0, rows).narrow(1, 0, outputs), bound, bound));
        for (int64_t row = 0; row < rows; ++row) {
          CHECK(got[row].equal(generate::rows_product(x.narrow(0, row, 1), w)[0].narrow(0, 0, outputs)));
        }
      }
    }
  }
}

TEST_CASE("generate invariant: weights that lie otherwise are left to libtorch for products only", "[generate]") {
  torch::manual_seed(5);
  const auto x = torch::randn({2, 50}), y = torch::randn({50, 30}), tall = y.t().contiguous();
  const auto by_rows = generate::rows_product(x, tall), plain = at::mm(x, y);
  const generate::InvariantRows region(/*products_only=*/true);
  CHECK(at::mm(x, tall.t()).equal(by_rows));
  CHECK(at::linear(x, tall).equal(by_rows));
  CHECK(at::mm(x, y).equal(plain));
  CHECK(at::linear(x, y.t()).allclose(plain, 1e-5, 1e-5));
  CHECK(at::silu(x).equal([&] {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::DeferredInit);
    return at::silu(x);
  }()));
  {
    const generate::InvariantRows inner;
    CHECK(at::mm(x, y).equal(by_rows));  // copied first
  }
  CHECK(at::mm(x, y).equal(plain));
}

TEST_CASE("generate invariant: gradients are those of the plain model", "[generate]") {
  SmallText model;
  const auto ids = torch::tensor(some_prompts(1, 3)[0], at::kLong).unsqueeze(0);
  const auto gradients = [&](bool invariant) {
    std::optional<BatchInvariant> region;
    if (invariant) region.emplace();
    model.zero_grad();
    model.forward(ids).log_softmax(-1).index({torch::indexing::Slice(), torch::indexing::Slice(), 3}).sum().backward();
    std::vector<at::Tensor> all;
    for (const auto& parameter : model.parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  const auto expected = gradients(false), got = gradients(true);
  for (size_t i = 0; i < got.size(); ++i) CHECK(got[i].allclose(expected[i], 1e-9, 1e-11));
}

TEST_CASE("generate invariant: log-probabilities are bit-equal to those of training", "[generate]") {
  const auto prompts = some_prompts(6, 2);
  const Settings settings{.temperature = 0.8, .max_tokens = 20, .seed = 3};
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    SmallText model(3, dtype);
    for (const auto& options : {generate::EngineOptions{.batch_invariant = true},
                                generate::EngineOptions{.tokens_per_step = 11, .chunk = 5, .batch_invariant = true}}) {
      Engine engine(model, options);
      const auto got = engine.generate(prompts, settings);
      for (size_t i = 0; i < prompts.size(); ++i) {
        const auto& output = got[i].outputs[0];
        CHECK(output.logprobs == by_training(model, prompts[i], output.tokens));
        CHECK(engine.generate({prompts[i]}, settings)[0].outputs[0].logprobs == output.logprobs);  // alone, from the cache
      }
    }
  }
}

#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
TEST_CASE("generate invariant: the attention of libtorch itself goes by pages", "[generate]") {
  torch::manual_seed(4);
  const auto q = torch::randn({2, 4, 37, 8}), k = torch::randn({2, 4, 37, 8}), v = torch::randn({2, 4, 37, 8});
  const BatchInvariant region;
  CHECK(at::scaled_dot_product_attention(q, k, v, {}, 0, true).equal(generate::attention_by_pages(q, k, v, 1 / std::sqrt(8.0))));
}
#endif

TEST_CASE("generate invariant: on ranks too", "[generate]") {
  const auto prompts = some_prompts(3, 2);
  for (const int ranks : {2, 4}) {
    REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"tp"});
      const Spmd spmd(mesh);
      SmallText model(3, at::kFloat);
      parallelize_module(model, mesh, automatic_plan(model));
      Engine engine(model, {.tokens_per_step = 24, .batch_invariant = true});
      const auto got = engine.generate(prompts, {.max_tokens = 10, .seed = 3});
      for (size_t i = 0; i < prompts.size(); ++i) {
        const auto& output = got[i].outputs[0];
        require(output.logprobs == by_training(model, prompts[i], output.tokens), "test", "other bits of prompt {}", i);
      }
    }));
  }
}
