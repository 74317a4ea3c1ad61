// Weights that come from another mesh or layout: what is decoded next is what a fresh engine decodes.
#include "tests/support/generate_support.hpp"

using namespace dtensor;
using namespace dtensor::test;
using generate::Engine;
using generate::Settings;

namespace {

// Log-probabilities of all tokens at each place.
const Settings kTold{.temperature = 0, .max_tokens = 6, .top_logprobs = kVocabulary};

void require_equal(const generate::Completion& got, const generate::Completion& expected) {
  const auto &a = got.outputs[0], &b = expected.outputs[0];
  require(a.tokens == b.tokens, "test", "got tokens {}; expected {}", fmt::join(a.tokens, " "), fmt::join(b.tokens, " "));
  for (size_t i = 0; i < b.top.size(); ++i) {
    for (size_t k = 0; k < b.top[i].size(); ++k) {
      const auto &x = a.top[i][k], &y = b.top[i][k];
      require(x.token == y.token && std::abs(x.logprob - y.logprob) < 1e-12, "test", "place {}: token {} has {}; expected {}", i, x.token,
              x.logprob, y.logprob);
    }
  }
}

// A prompt is in the cache, and one is under way, when weights of another kind come.
void swap_weights(SmallText& generating, const torch::nn::Module& training, SmallText& fresh) {
  const auto prompts = some_prompts(3, 9);
  Engine engine(generating);
  const auto old = engine.generate(prompts, kTold);
  auto under_way = engine.submit({.prompt = prompts[0], .settings = kTold});
  for (int i = 0; i < 3; ++i) engine.step();
  engine.load_weights(training, 4);
  require(engine.version() == 4, "test", "version {}", engine.version());
  const auto versions = under_way.get().outputs[0].versions;
  require(versions == std::vector<int64_t>{0, 0, 0, 4, 4, 4}, "test", "got versions {}", fmt::join(versions, " "));
  Engine other(fresh);
  const auto expected = other.generate(prompts, kTold), got = engine.generate(prompts, kTold);
  for (size_t i = 0; i < prompts.size(); ++i) {
    require_equal(got[i], expected[i]);
    require(got[i].outputs[0].top[0][0].logprob != old[i].outputs[0].top[0][0].logprob, "test", "the weights are the old ones");
    require(std::ranges::count(got[i].outputs[0].versions, 4) == 6, "test", "other versions");
  }
}

}  // namespace

TEST_CASE("generate weights: from a module on the same device", "[generate]") {
  SmallText model, training(31), fresh(31);
  REQUIRE_NOTHROW(swap_weights(model, training, fresh));
}

TEST_CASE("generate weights: from other layouts and meshes", "[generate]") {
  for (const std::string transport : {"threads", "shm"}) {
    CAPTURE(transport);
    // Sharded over all ranks, to tp=4; to dp=2 with tp=2; to plain parameters on every rank; and plain ones to tp=4.
    for (const std::string way : {"tp=4", "dp=2,tp=2", "plain", "from plain"}) {
      CAPTURE(way);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World&) {
            const auto all = init_device_mesh(c10::kCPU, {4}, {"dp"});
            std::optional<SmallText> training, model, fresh;
            std::optional<FullyShard> sharded;
            if (way == "from plain") {
              training.emplace(31);
            } else {
              const Spmd spmd(all);
              training.emplace(31);
              sharded.emplace(fully_shard(*training, all));
            }
            std::optional<Spmd> spmd;
            const auto mesh =
                way == "dp=2,tp=2" ? init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"}) : init_device_mesh(c10::kCPU, {4}, {"tp"});
            if (way != "plain") spmd.emplace(mesh);
            model.emplace();
            fresh.emplace(31);
            if (way != "plain") {
              for (auto* module : {&*model, &*fresh}) parallelize_module(*module, mesh, automatic_plan(*module));
            }
            swap_weights(*model, *training, *fresh);
          },
          transport));
    }
  }
}

TEST_CASE("generate weights: from ranks that only train to ranks that only generate", "[generate]") {
  REQUIRE_NOTHROW(on_ranks(4, [](World& world) {
    const DeviceMesh trainers(c10::kCPU, {0, 1}, {2}, {"dp"}), generators(c10::kCPU, {2, 3}, {2}, {"tp"});
    std::optional<SmallText> training, model, fresh;
    on(trainers, [&] {
      training.emplace(31);
      parallelize_module(*training, trainers, Plan{});
    });
    on(generators, [&] {
      model.emplace();
      fresh.emplace(31);
      for (auto* module : {&*model, &*fresh}) parallelize_module(*module, generators, automatic_plan(*module));
    });
    generate::copy_weights(*model, *training);
    if (world.rank() < 2) return;
    const Spmd spmd(generators);
    Engine engine(*model), other(*fresh);
    const auto prompts = some_prompts(3);
    const auto got = engine.generate(prompts, kTold), expected = other.generate(prompts, kTold);
    for (size_t i = 0; i < prompts.size(); ++i) require_equal(got[i], expected[i]);
  }));
}

TEST_CASE("generate weights: those that do not fit are refused and nothing is written", "[generate]") {
  SmallText model, training(31);
  Engine engine(model);
  const auto before = engine.generate({{1, 2, 3}}, kTold)[0];
  auto weights = generate::named_weights(training);
  weights["head.weight"] = at::zeros({kVocabulary, 17}, at::kDouble);
  refuses("the weights of head.weight have sizes [23, 17]; expected [23, 16]", [&] { engine.load_weights(weights, 1); });
  weights.erase("head.weight");
  refuses("there are no weights for head.weight", [&] { engine.load_weights(weights, 1); });
  CHECK(engine.version() == 0);
  REQUIRE_NOTHROW(require_equal(engine.generate({{1, 2, 3}}, kTold)[0], before));
  Engine of_function([&](const at::Tensor& ids) { return model.forward(ids); }, nullptr, {});
  refuses("the engine has a function and no module", [&] { of_function.load_weights(training, 1); });
}

namespace {

// Takes its learned positions from the number of rows, which are others when an engine decodes.
struct OwnPlaces : SmallText {
  using SmallText::SmallText;
  void scale_places(double scale) {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(1);
    places->weight.normal_(0, scale);
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = words(ids) + places->weight.narrow(0, 0, ids.size(1));
    const auto table = nn::rotary_table(ids.size(1), 4, {}, x);
    for (size_t i = 0; i < attention.size(); ++i) {
      x = x + attention[i](at::layer_norm(x, {16}), table);
      x = x + hidden[i](at::layer_norm(x, {16}));
    }
    return head(norm(nn::scored_rows(x)));
  }
};

}  // namespace

TEST_CASE("generate weights: positions that hardly count are noticed and rounding is not", "[generate]") {
  for (const auto& [dtype, scale] : {std::pair{at::kDouble, 1e-9}, {at::kFloat, 1e-3}, {at::kBFloat16, 1.0}}) {
    for (const uint64_t seed : {3, 4, 5, 6}) {
      CAPTURE(c10::toString(dtype), seed);
      OwnPlaces own(seed, dtype);
      own.scale_places(scale);
      CHECK_FALSE(Engine(own).runner().pages());
      SmallText right(seed, dtype);
      Engine with_pages(right), invariant(right, {.batch_invariant = true});
      CHECK(with_pages.runner().why_not() == "");
      CHECK(invariant.runner().why_not() == "");
      for (int version = 1; version < 3; ++version) with_pages.load_weights(version);
      CHECK(with_pages.runner().pages());
    }
  }
}

TEST_CASE("generate weights: positions that begin to count with new weights are noticed then", "[generate]") {
  const auto prompts = some_prompts(3, 9);
  for (const bool recompute : {true, false}) {
    OwnPlaces model;
    model.scale_places(0);
    Engine engine(model);
    REQUIRE(engine.runner().pages());
    engine.generate(prompts, kTold);
    auto under_way = engine.submit({.prompt = prompts[0], .settings = kTold});
    for (int i = 0; i < 3; ++i) engine.step();
    model.scale_places(1);
    engine.load_weights(2, recompute);
    CHECK_FALSE(engine.runner().pages());
    CHECK(under_way.get().outputs[0].tokens.size() == 6);
    const auto got = engine.generate(prompts, kTold);
    for (size_t i = 0; i < prompts.size(); ++i) require_same(got[i].outputs[0], decode_slowly(model, prompts[i], kTold), "own places");
    CHECK(engine.blocks_unused() == engine.blocks());
  }
}

TEST_CASE("generate weights: later weights are tried each sixteenth time", "[generate]") {
  OwnPlaces model;
  model.scale_places(0);
  Engine engine(model);
  int64_t version = 0;
  while (version < 17) engine.load_weights(++version);
  REQUIRE(engine.runner().pages());
  model.scale_places(1);
  while (engine.runner().pages() && version < 100) engine.load_weights(++version);
  CHECK(version == 32);
}
