// The engine on one device: tokens are those of the model's own forward, whatever shares the batch.
#include "tests/support/generate_support.hpp"

using namespace dtensor;
using namespace dtensor::test;
using generate::Engine;
using generate::EngineOptions;
using generate::Finish;
using generate::Settings;
using generate::Tokens;

namespace {

const Settings kDrawn{.temperature = 0.9, .top_p = 0.95, .max_tokens = 20, .seed = 5};

// Blocks for so many positions.
EngineOptions with_room(int64_t positions, EngineOptions options = {}) {
  SmallText model;
  const generate::Runner runner([&](const at::Tensor& ids) { return model.forward(ids); }, {});
  options.cache_bytes = positions / 16 * runner.bytes_of_block();
  return options;
}

}  // namespace

TEST_CASE("generate: tokens and their log-probabilities are those of the model", "[generate]") {
  SmallText model;
  const auto prompts = some_prompts(12);
  struct Named {
    const char* name;
    EngineOptions options;
  };
  const Named all[] = {{"plain", {}},
                       {"one at a time", {.max_requests = 1}},
                       {"chunks", {.tokens_per_step = 13, .chunk = 5}},
                       {"no sharing", {.share_prefixes = false}},
                       {"small cache", with_room(112)},
                       {"small cache and chunks", with_room(96, {.tokens_per_step = 7, .chunk = 4})}};
  for (const auto& settings : {Settings{.temperature = 0, .max_tokens = 20}, kDrawn}) {
    std::vector<generate::Output> expected;
    for (const auto& prompt : prompts) expected.push_back(decode_slowly(model, prompt, settings));
    for (const auto& [name, options] : all) {
      CAPTURE(name, settings.temperature);
      Engine engine(model, options);
      REQUIRE(engine.runner().pages());
      for (int round = 0; round < 2; ++round) {  // in the second, prompts are in the cache
        const auto got = engine.generate(prompts, settings);
        for (size_t i = 0; i < prompts.size(); ++i)
          REQUIRE_NOTHROW(require_same(got[i].outputs[0], expected[i], fmt::format("prompt {}", i)));
      }
      const auto counts = engine.counts();
      CHECK(engine.blocks_unused() == engine.blocks());
      CHECK((counts.blocks_found > 0) == options.share_prefixes);
      if (std::string(name).starts_with("small cache")) CHECK(counts.preemptions > 0);
      CHECK(counts.tokens == 2 * 12 * 20);
    }
  }
}

TEST_CASE("generate: requests that come later change nothing", "[generate]") {
  SmallText model;
  const auto prompts = some_prompts(10, 4);
  std::mt19937_64 random(2);
  Engine engine(model, {.max_requests = 4, .tokens_per_step = 20});
  std::vector<size_t> order(prompts.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::map<size_t, generate::Future> futures;
  for (const auto i : order) {
    for (auto steps = random() % 7; steps > 0; --steps) engine.step();
    futures.emplace(i, engine.submit({.prompt = prompts[i], .settings = kDrawn, .priority = static_cast<int64_t>(random() % 3)}));
  }
  for (size_t i = 0; i < prompts.size(); ++i)
    require_same(futures.at(i).get().outputs[0], decode_slowly(model, prompts[i], kDrawn), "late");
  CHECK(engine.idle());
}

TEST_CASE("generate: several outputs of a prompt share its pages", "[generate]") {
  SmallText model;
  const Tokens prompt = some_prompts(1, 9)[0];
  auto settings = kDrawn;
  settings.n = 5;
  for (const auto& options : {EngineOptions{}, with_room(64), EngineOptions{.max_requests = 2}}) {
    Engine engine(model, options);
    const auto completion = engine.generate({prompt}, settings)[0];
    REQUIRE(completion.outputs.size() == 5);
    for (int64_t i = 0; i < 5; ++i) require_same(completion.outputs[i], decode_slowly(model, prompt, settings, i), "output");
    CHECK(completion.outputs[0].tokens != completion.outputs[1].tokens);
    CHECK(engine.blocks_unused() == engine.blocks());
    if (options.cache_bytes == EngineOptions{}.cache_bytes && options.max_requests > 2) {
      CHECK(engine.counts().rows == static_cast<int64_t>(prompt.size()) + 5 * 19);  // the prompt once
    }
  }
}

TEST_CASE("generate: ends by tokens and texts and lengths", "[generate]") {
  SmallText model;
  const Tokens prompt{1, 2, 3};
  Engine engine(model, {.text_of = [](int64_t token) { return std::string(1, static_cast<char>('a' + token)); }});
  const auto whole = engine.generate({prompt}, kDrawn)[0].outputs[0];
  REQUIRE(whole.finish == Finish::length);
  REQUIRE(whole.text.size() == 20);
  auto settings = kDrawn;
  settings.stop = {"never there", whole.text.substr(5, 3)};
  std::string streamed;
  std::vector<Finish> ends;
  auto future = engine.submit({.prompt = prompt, .settings = settings, .on_piece = [&](const generate::Piece& piece) {
                                 streamed += piece.text;
                                 ends.push_back(piece.finish);
                               }});
  const auto cut = future.get().outputs[0];
  const auto at = whole.text.find(settings.stop[1]);
  CHECK(cut.finish == Finish::stop_text);
  CHECK(cut.text == whole.text.substr(0, at));
  CHECK(streamed == cut.text);
  CHECK(ends.size() == cut.tokens.size());
  CHECK(ends.back() == Finish::stop_text);
  settings = kDrawn;
  settings.stop_tokens = {whole.tokens[7]};
  const auto stopped = engine.generate({prompt}, settings)[0].outputs[0];
  CHECK(stopped.finish == Finish::stop_token);
  CHECK(stopped.tokens.back() == whole.tokens[7]);
  CHECK(stopped.text.size() + 1 == stopped.tokens.size());
  Engine short_one(model, {.max_length = 10});
  const auto limited = short_one.generate({prompt}, kDrawn)[0].outputs[0];
  CHECK(limited.finish == Finish::length);
  CHECK(limited.tokens == Tokens(whole.tokens.begin(), whole.tokens.begin() + 7));
  // The model has 96 positions.
  settings = kDrawn;
  settings.max_tokens = 500;
  CHECK(engine.generate({prompt}, settings)[0].outputs[0].tokens.size() == 93);
}

TEST_CASE("generate: log-probabilities as asked for", "[generate]") {
  SmallText model;
  const Tokens prompt = some_prompts(1, 3)[0];
  auto settings = kDrawn;
  settings.top_logprobs = 3;
  settings.prompt_logprobs = true;
  Engine engine(model, {.tokens_per_step = 6});
  for (int round = 0; round < 2; ++round) {
    const auto completion = engine.generate({prompt}, settings)[0];
    const auto& output = completion.outputs[0];
    auto all = prompt;
    all.insert(all.end(), output.tokens.begin(), output.tokens.end());
    const torch::NoGradGuard no_grad;
    const auto expected = model.forward(torch::tensor(all, at::kLong).unsqueeze(0))[0].log_softmax(-1);
    REQUIRE(completion.prompt_logprobs.size() == prompt.size() - 1);
    for (size_t i = 1; i < all.size(); ++i) {
      const auto got = i < prompt.size() ? completion.prompt_logprobs[i - 1] : output.logprobs[i - prompt.size()];
      CHECK(std::abs(got - expected[static_cast<int64_t>(i) - 1][all[i]].item<double>()) < 1e-10);
    }
    for (size_t i = 0; i < output.tokens.size(); ++i) {
      const auto [values, tokens] = expected[static_cast<int64_t>(prompt.size() + i) - 1].topk(3);
      for (int64_t k = 0; k < 3; ++k) {
        CHECK(output.top[i][k].token == tokens[k].item<int64_t>());
        CHECK(std::abs(output.top[i][k].logprob - values[k].item<double>()) < 1e-10);
      }
    }
  }
  settings.logprobs_of_sampled = true;
  settings.temperature = 0.5;
  settings.top_k = 2;
  const auto sampled = engine.generate({prompt}, settings)[0].outputs[0];
  for (size_t i = 0; i < sampled.tokens.size(); ++i) {
    CHECK(sampled.top[i].size() <= 2);
    double sum = 0;
    for (const auto& entry : sampled.top[i]) sum += std::exp(entry.logprob);
    CHECK(std::abs(sum - 1) < 1e-12);
  }
}

TEST_CASE("generate: new weights drop what the cache holds", "[generate]") {
  SmallText model, other(17);
  const auto prompts = some_prompts(6, 8);
  for (const bool recompute : {true, false}) {
    SmallText trained;
    Engine engine(trained);
    engine.generate(prompts, kDrawn);
    auto under_way = engine.submit({.prompt = prompts[0], .settings = kDrawn});
    for (int i = 0; i < 5; ++i) engine.step();
    {
      const torch::NoGradGuard no_grad;
      auto to = trained.parameters(), from = other.parameters();
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    engine.load_weights(3, recompute);
    const auto mixed = under_way.get().outputs[0];
    CHECK(mixed.versions.front() == 0);
    CHECK(mixed.versions.back() == 3);
    CHECK(std::ranges::count(mixed.versions, 0) == 5);
    const auto fresh = engine.generate(prompts, kDrawn);
    for (size_t i = 0; i < prompts.size(); ++i) require_same(fresh[i].outputs[0], decode_slowly(other, prompts[i], kDrawn), "new weights");
    if (recompute) {  // the rest is what the new weights say after the first tokens
      auto so_far = prompts[0];
      so_far.insert(so_far.end(), mixed.tokens.begin(), mixed.tokens.begin() + 5);
      auto rest = kDrawn;
      rest.max_tokens = 15;
      CHECK(decode_slowly(other, so_far, rest).tokens == Tokens(mixed.tokens.begin() + 5, mixed.tokens.end()));
    }
  }
}

TEST_CASE("generate: cancels and aborts leave no page behind", "[generate]") {
  SmallText model;
  Engine engine(model, with_room(160, {.max_requests = 6}));
  std::mt19937_64 random(6);
  const auto prompts = some_prompts(30, 2);
  std::vector<generate::Future> futures;
  for (int i = 0; i < 1000; ++i) {
    auto settings = kDrawn;
    settings.n = 1 + static_cast<int64_t>(random() % 3);
    settings.max_tokens = 1 + static_cast<int64_t>(random() % 20);
    futures.push_back(engine.submit({.prompt = prompts[random() % prompts.size()], .settings = settings}));
    for (auto steps = random() % 3; steps > 0; --steps) engine.step();
    const auto which = random() % futures.size();
    if (random() % 2 == 0) futures[which].cancel();
    if (i % 100 == 99) engine.abort();
    if (futures[which].ready()) {
      const auto completion = futures[which].get();
      for (const auto& output : completion.outputs) REQUIRE(output.tokens.size() == output.logprobs.size());
    }
  }
  while (!engine.idle()) engine.step();
  CHECK(engine.blocks_unused() == engine.blocks());
  CHECK(engine.counts().most_blocks <= engine.blocks());
  auto future = engine.submit({.prompt = prompts[0], .settings = kDrawn});
  for (int i = 0; i < 4; ++i) engine.step();
  future.cancel();
  const auto part = future.get().outputs[0];
  CHECK(part.finish == Finish::cancelled);
  const auto whole = decode_slowly(model, prompts[0], kDrawn);
  CHECK(part.tokens.size() >= 3);
  CHECK(part.tokens == Tokens(whole.tokens.begin(), whole.tokens.begin() + static_cast<int64_t>(part.tokens.size())));
}

TEST_CASE("generate: what fails fails alone and by name", "[generate]") {
  SmallText model;
  Engine engine(model);
  const auto prompts = some_prompts(3, 5);
  auto good = engine.submit({.prompt = prompts[0], .settings = kDrawn});
  auto thrown =
      engine.submit({.prompt = prompts[1], .settings = kDrawn, .on_piece = [](const auto&) { throw std::runtime_error("no more"); }});
  auto settings = kDrawn;
  settings.allowed = [](std::span<const int64_t>, std::vector<bool>& allowed) { std::fill(allowed.begin(), allowed.end(), false); };
  auto none = engine.submit({.prompt = prompts[2], .settings = settings});
  require_same(good.get().outputs[0], decode_slowly(model, prompts[0], kDrawn), "good");
  CHECK_THROWS_WITH(thrown.get(), says("no more"));
  CHECK_THROWS_WITH(none.get(), says("no token is allowed"));
  CHECK(engine.idle());
  // Token 7 makes scores that are no numbers.
  SmallText broken;
  {
    const torch::NoGradGuard no_grad;
    broken.words->weight[7].fill_(std::nan(""));
  }
  Engine with_nan(broken);
  settings = kDrawn;
  settings.bad_words = {{7}};
  auto fine = with_nan.submit({.prompt = {1, 2, 3}, .settings = settings});
  auto bad = with_nan.submit({.prompt = {1, 7, 3}, .settings = settings});
  CHECK_THROWS_WITH(bad.get(), says("scores after 3 tokens have NaN"));
  require_same(fine.get().outputs[0], decode_slowly(model, {1, 2, 3}, settings), "beside NaN");
  CHECK(with_nan.blocks_unused() == with_nan.blocks());
}

TEST_CASE("generate: bad requests are refused and others go on", "[generate]") {
  SmallText model;
  Engine engine(model, with_room(64, {.max_length = 90}));
  const auto bad = [&](const std::string& text, const generate::Request& request) {
    refuses(text, [&] { engine.submit(request); });
    REQUIRE(engine.idle());
  };
  bad("empty prompt", {.prompt = {}});
  bad("the prompt has token 23; expected 0 to 22", {.prompt = {1, 23}});
  bad("the prompt has token -1", {.prompt = {-1}});
  bad("a prompt of 90 tokens; the longest sequence, with output, has 90", {.prompt = Tokens(90)});
  bad(fmt::format("need {} bytes of cache", 5 * engine.runner().bytes_of_block()), {.prompt = Tokens(60), .settings = {.max_tokens = 10}});
  bad("got n of 0", {.prompt = {1}, .settings = {.n = 0}});
  bad("top_p", {.prompt = {1}, .settings = {.top_p = 0}});
  refuses("no room for a block", [&] { Engine none(model, {.cache_bytes = 100}); });
  refuses("max_requests 0", [&] { Engine none(model, {.max_requests = 0}); });
  CHECK_THROWS(engine.generate({{1, 2}, {}}, kDrawn));
  CHECK(engine.idle());
}

TEST_CASE("generate: frozen modules keep their mode", "[generate]") {
  SmallText model;
  model.train();
  auto children = model.children();
  REQUIRE(children.size() > 1);
  children[0]->eval();
  std::vector<bool> before;
  for (const auto& module : model.modules(false)) before.push_back(module->is_training());
  Engine engine(model);
  engine.generate(some_prompts(2), kDrawn);
  std::vector<bool> after;
  for (const auto& module : model.modules(false)) after.push_back(module->is_training());
  CHECK(before == after);
  CHECK(model.is_training());
}

TEST_CASE("generate: any number of new tokens is checked against the cache", "[generate]") {
  SmallText model;
  Engine engine(model, with_room(48));
  for (const auto tokens : {int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    CHECK_THROWS_WITH(engine.submit({{1, 2, 3}, {.max_tokens = tokens}}), says("bytes of cache on this rank"));
  }
}

TEST_CASE("generate: models whose attention takes no part are computed anew", "[generate]") {
  struct Own : torch::nn::Module {
    Own() { words = register_module("words", torch::nn::Embedding(kVocabulary, 16)); }
    at::Tensor forward(const at::Tensor& ids) {
      const auto x = words(ids) + torch::arange(ids.size(1), at::kFloat).sin().unsqueeze(1);
      const auto hidden = torch::ones({ids.size(1), ids.size(1)}, at::kBool).triu(1);
      const auto y = torch::matmul(torch::matmul(x, x.transpose(1, 2)).masked_fill(hidden, -1e9).softmax(-1), x);
      return torch::matmul(y, words->weight.t());
    }
    torch::nn::Embedding words{nullptr};
  };
  torch::manual_seed(1);
  Own model;
  Engine engine(model, {.tokens_per_step = 9});
  CHECK_FALSE(engine.runner().pages());
  CHECK(engine.runner().why_not().find("calls neither") != std::string::npos);
  const auto prompts = some_prompts(5);
  const auto got = engine.generate(prompts, {.max_tokens = 8, .seed = 3, .n = 2});
  for (size_t i = 0; i < prompts.size(); ++i) {
    for (int64_t k = 0; k < 2; ++k) {
      CHECK(got[i].outputs[k].tokens == decode_slowly(model, prompts[i], {.max_tokens = 8, .seed = 3}, k).tokens);
    }
  }
}

TEST_CASE("generate: without pages a request that is too long for the model fails alone", "[generate]") {
  SmallText inner;
  const auto forward = [&](const at::Tensor& ids) {
    require(ids.size(1) <= 12, "model", "{} tokens are too many", ids.size(1));
    return inner.forward(torch::cat({ids, ids}, 1)).narrow(1, 0, ids.size(1));  // not what pages are for
  };
  Engine engine(forward, &inner, {});
  REQUIRE_FALSE(engine.runner().pages());
  auto fits = engine.submit({.prompt = {1, 2, 3}, .settings = {.max_tokens = 8}});
  auto grows = engine.submit({.prompt = {4, 5, 6}, .settings = {.max_tokens = 20}});
  auto is_long = engine.submit({.prompt = Tokens(13, 1), .settings = {.max_tokens = 2}});
  CHECK_THROWS_WITH(is_long.get(), says("13 tokens are too many"));
  CHECK_THROWS_WITH(grows.get(), says("13 tokens are too many"));
  require_same(fits.get().outputs[0], decode_slowly(inner, {1, 2, 3}, {.max_tokens = 8}), "beside one that is too long");
  CHECK(engine.blocks_unused() == engine.blocks());
}
