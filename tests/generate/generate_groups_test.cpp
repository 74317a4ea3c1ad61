// Prompts shared out over groups of ranks: every rank gets the completions of one device.
#include "tests/support/generate_support.hpp"

#include <dtensor/generate/drafters.hpp>

using namespace dtensor;
using namespace dtensor::test;
using generate::Engine;
using generate::Settings;
using generate::Tokens;

namespace {

const Settings kShared{.temperature = 0.9, .top_k = 12, .max_tokens = 12, .seed = 5, .n = 2, .top_logprobs = 2, .prompt_logprobs = true};

// Runs `body` with a model whose heads tp cuts, and which all groups along dp have.
void on_groups(int64_t dp, int64_t tp, const std::string& transport, const std::function<void(SmallText&, const DeviceMesh&)>& body) {
  on_ranks(
      static_cast<int>(dp * tp),
      [&](World&) {
        const auto mesh = init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
        const Spmd spmd(mesh);
        SmallText model;
        parallelize_module(model, mesh, automatic_plan(model));
        body(model, mesh);
      },
      transport);
}

std::vector<generate::Completion> of_one_device(const std::vector<Tokens>& prompts) {
  SmallText model;
  Engine engine(model);
  return engine.generate(prompts, kShared);
}

void require_alike(const std::vector<generate::Completion>& got, const std::vector<generate::Completion>& expected) {
  require(got.size() == expected.size(), "test", "{} completions; expected {}", got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    require(got[i].prompt_logprobs.size() == expected[i].prompt_logprobs.size(), "test", "other prompt");
    for (size_t k = 0; k < expected[i].outputs.size(); ++k) {
      const auto &a = got[i].outputs[k], &b = expected[i].outputs[k];
      require_same(a, b, fmt::format("prompt {}, output {}", i, k));
      require(a.text == b.text && a.finish == b.finish && a.versions == b.versions, "test", "another text or end");
      for (size_t j = 0; j < b.top.size(); ++j) {
        const bool same =
            a.top[j].size() == 2 && a.top[j][1].token == b.top[j][1].token && std::abs(a.top[j][1].logprob - b.top[j][1].logprob) < 1e-9;
        require(same, "test", "other top log-probabilities");
      }
    }
  }
}

int64_t over_dp(const CommDebugMode& counted) {
  int64_t count = 0;
  for (const auto& [line, totals] : counted.lines()) {
    if (line.group.find("dp") != std::string::npos) count += totals.count;
  }
  return count;
}

}  // namespace

TEST_CASE("generate groups: each decodes its share and all ranks get all", "[generate]") {
  for (const size_t count : {7, 1}) {  // one: a group has nothing to do
    const auto prompts = some_prompts(static_cast<int64_t>(count));
    const auto expected = of_one_device(prompts);
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      for (const auto& [dp, tp] : {std::pair{2, 1}, {2, 2}, {4, 1}}) {
        if (transport != "threads" && dp * tp != 4) continue;
        CAPTURE(count, transport, dp, tp);
        REQUIRE_NOTHROW(on_groups(dp, tp, transport, [&, dp = dp](SmallText& model, const DeviceMesh& mesh) {
          Engine engine(model, {.tokens_per_step = 24, .chunk = 10});
          for (int round = 0; round < 2; ++round) {
            const CommDebugMode counted;
            const auto before = engine.counts().tokens;
            require_alike(engine.generate(prompts, kShared), expected);
            const auto group = mesh.coordinate(0), all = static_cast<int64_t>(count);
            const auto share = all * (group + 1) / dp - all * group / dp;
            require(engine.counts().tokens - before == share * 24, "test", "{} tokens", engine.counts().tokens - before);
            require(over_dp(counted) == 2, "test", "{} collectives over dp", over_dp(counted));
          }
          require(engine.blocks_unused() == engine.blocks(), "test", "pages are left");
        }));
      }
    }
  }
}

TEST_CASE("generate groups: what is submitted is decoded in every group", "[generate]") {
  const auto prompts = some_prompts(5);
  const auto expected = of_one_device(prompts);
  REQUIRE_NOTHROW(on_groups(2, 2, "threads", [&](SmallText& model, const DeviceMesh&) {
    Engine engine(model);
    engine.generate(prompts, kShared);
    int64_t pieces = 0;
    auto future = engine.submit({.prompt = prompts[3], .settings = kShared, .on_piece = [&](const auto&) { ++pieces; }});
    engine.step();
    require_alike(engine.generate(prompts, kShared), expected);  // not alone: every group decodes all
    require_alike({future.get()}, {expected[3]});
    require(pieces == 24, "test", "{} pieces", pieces);
    Engine whole(model, {.split_over = ""});
    require_alike(whole.generate(prompts, kShared), expected);
    require(whole.counts().tokens == 5 * 24, "test", "{} tokens", whole.counts().tokens);
  }));
}

TEST_CASE("generate groups: parameters that dp cuts are not decoded apart", "[generate]") {
  const auto prompts = some_prompts(4);
  const auto expected = of_one_device(prompts);
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
    const Spmd spmd(mesh);
    SmallText model;
    fully_shard(model, mesh);
    Engine engine(model);
    require_alike(engine.generate(prompts, kShared), expected);
    require(engine.counts().tokens == 4 * 24, "test", "{} tokens", engine.counts().tokens);
  }));
}

TEST_CASE("generate groups: a prompt that fails fails on every rank", "[generate]") {
  const auto prompts = some_prompts(6);
  const auto expected = of_one_device(prompts);
  for (const size_t bad : {1, 4}) {  // in the first group, in the second
    REQUIRE_NOTHROW(on_groups(2, 2, "threads", [&](SmallText& model, const DeviceMesh&) {
      Engine engine(model);
      auto settings = kShared;
      settings.allowed = [&](std::span<const int64_t> tokens, std::vector<bool>&) {
        const auto& prompt = prompts[bad];
        if (tokens.size() >= prompt.size() && std::ranges::equal(tokens.first(prompt.size()), prompt)) fail("test", "not this one");
      };
      std::string text;
      try {
        engine.generate(prompts, settings);
      } catch (const std::exception& error) {
        const auto* ours = dynamic_cast<const Error*>(&error);
        text = ours ? ours->what_without_backtrace() : error.what();
      }
      require(text.find("not this one") != std::string::npos, "test", "got '{}'", text);
      require(text.find("frame #") == std::string::npos, "test", "a stack in '{}'", text);
      require(engine.idle() && engine.blocks_unused() == engine.blocks(), "test", "something is left");
      require_alike(engine.generate(prompts, kShared), expected);
      refuses("empty prompt", [&] { engine.generate({prompts[0], {}}, kShared); });
    }));
  }
}

TEST_CASE("generate groups: a model that fails in one group ends the call on every rank", "[generate]") {
  const auto prompts = some_prompts(6);
  const auto expected = of_one_device(prompts);
  REQUIRE_NOTHROW(on_groups(2, 2, "threads", [&](SmallText& model, const DeviceMesh& mesh) {
    int64_t passes = 0, last = std::numeric_limits<int64_t>::max();
    const auto forward = [&](const at::Tensor& ids) {
      if (mesh.coordinate(0) == 1 && ++passes > last) throw std::runtime_error("the model is lost");
      return model.forward(ids);
    };
    Engine engine(forward, &model, {});
    last = passes + 4;
    std::string text;
    try {
      engine.generate(prompts, kShared);
    } catch (const std::exception& error) {
      text = error.what();
    }
    require(text.find("the model is lost") != std::string::npos, "test", "got '{}'", text);
    last = std::numeric_limits<int64_t>::max();
    require_alike(engine.generate(prompts, kShared), expected);
  }));
}

TEST_CASE("generate groups: ranks that ask for other prompts are told so", "[generate]") {
  CHECK_THROWS_WITH(on_groups(2, 1, "threads",
                              [&](SmallText& model, const DeviceMesh& mesh) {
                                Engine engine(model);
                                engine.generate({{1, 2 + mesh.coordinate(0)}}, kShared);
                              }),
                    says("asked for other prompts or settings than rank 0: another prompt; expected all of them alike"));
}

TEST_CASE("generate groups: drafters learn from the outputs of all", "[generate]") {
  const auto prompts = some_prompts(6);
  const auto expected = of_one_device(prompts);
  std::vector<int64_t> nodes(4);
  REQUIRE_NOTHROW(on_groups(2, 2, "threads", [&](SmallText& model, const DeviceMesh&) {
    const auto trees = std::make_shared<generate::RolloutTrees>();
    Engine engine(model, {.drafter = trees});
    require_alike(engine.generate(prompts, kShared), expected);
    require_alike(engine.generate(prompts, kShared), expected);
    nodes[World::current().rank()] = trees->nodes();
    require(trees->prompts() == 6, "test", "{} prompts", trees->prompts());
  }));
  for (const auto count : nodes) CHECK(count == nodes[0]);
  CHECK(nodes[0] > 100);
}
