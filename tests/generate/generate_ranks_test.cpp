// The engine over ranks: one device's tokens on every rank, and one end for all when something fails.
#include "tests/support/generate_support.hpp"

using namespace dtensor;
using namespace dtensor::test;
using generate::Engine;
using generate::Settings;

namespace {

const Settings kSettings{.temperature = 0.9, .top_k = 12, .max_tokens = 12, .seed = 5, .n = 2};

// Runs `body` with a model whose heads tp cuts.
void on_mesh(int ranks, const std::string& transport, const std::function<void(SmallText&, World&)>& body) {
  on_ranks(
      ranks,
      [&](World& world) {
        const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"tp"});
        const Spmd spmd(mesh);
        SmallText model;
        parallelize_module(model, mesh, automatic_plan(model));
        body(model, world);
      },
      transport);
}

std::vector<std::vector<generate::Output>> on_one_device(const std::vector<generate::Tokens>& prompts, const Settings& settings) {
  SmallText model;
  std::vector<std::vector<generate::Output>> all;
  for (const auto& prompt : prompts) {
    auto& outputs = all.emplace_back();
    for (int64_t i = 0; i < settings.n; ++i) outputs.push_back(decode_slowly(model, prompt, settings, i));
  }
  return all;
}

}  // namespace

TEST_CASE("generate on ranks: the tokens of one device", "[generate]") {
  const auto prompts = some_prompts(6);
  for (const double temperature : {0.0, 0.9}) {
    auto settings = kSettings;
    settings.temperature = temperature;
    const auto expected = on_one_device(prompts, settings);
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      for (const int ranks : {1, 2, 4}) {  // of 4, two have the same key head
        if (transport == "gloo" && ranks != 2) continue;
        CAPTURE(transport, ranks);
        REQUIRE_NOTHROW(on_mesh(ranks, transport, [&](SmallText& model, World&) {
          Engine engine(model, {.tokens_per_step = 24, .chunk = 10});
          require(engine.runner().pages(), "test", "no pages: {}", engine.runner().why_not());
          const auto got = engine.generate(prompts, settings);
          for (size_t i = 0; i < prompts.size(); ++i) {
            for (int64_t k = 0; k < settings.n; ++k) require_same(got[i].outputs[k], expected[i][k], "on ranks");
          }
          require(engine.blocks_unused() == engine.blocks(), "test", "pages are left");
        }));
      }
    }
  }
}

TEST_CASE("generate on ranks: a rank holds the pages of its heads", "[generate]") {
  std::map<int, int64_t> bytes;
  for (const int ranks : {1, 2, 4}) {
    on_mesh(ranks, "threads", [&](SmallText& model, World& world) {
      Engine engine(model);
      if (world.rank() == 0) bytes[ranks] = engine.runner().bytes_of_block();
    });
  }
  CHECK(bytes[2] * 2 == bytes[1]);
  CHECK(bytes[4] == bytes[2]);  // two key heads: each on two ranks
}

TEST_CASE("generate on ranks: a callback that throws on one rank ends its request on all", "[generate]") {
  const auto prompts = some_prompts(3);
  const auto expected = on_one_device({prompts[0]}, kSettings);
  for (const std::string transport : {"threads", "shm"}) {
    REQUIRE_NOTHROW(on_mesh(2, transport, [&](SmallText& model, World& world) {
      Engine engine(model);
      int64_t pieces = 0;
      auto bad = engine.submit({.prompt = prompts[1], .settings = kSettings, .on_piece = [&](const generate::Piece&) {
                                  if (world.rank() == 1 && ++pieces == 5) throw std::runtime_error("full");
                                }});
      auto good = engine.submit({.prompt = prompts[0], .settings = kSettings});
      require_same(good.get().outputs[1], expected[0][1], "beside a failure");
      std::string text;
      try {
        bad.get();
      } catch (const std::exception& error) {
        text = error.what();
      }
      require(text.find("full") != std::string::npos, "test", "got '{}'", text);
      require(world.rank() == 1 || text.find("failed on rank 1") != std::string::npos, "test", "got '{}'", text);
    }));
  }
}

TEST_CASE("generate on ranks: tokens that differ end all requests", "[generate]") {
  CHECK_THROWS_WITH(on_mesh(2, "threads",
                            [&](SmallText& model, World& world) {
                              Engine engine(model);
                              auto settings = kSettings;
                              settings.allowed = [&](auto, std::vector<bool>& allowed) {
                                for (size_t token = 0; token < allowed.size(); ++token)
                                  allowed[token] = token % 2 == static_cast<size_t>(world.rank());
                              };
                              engine.generate({{1, 2}}, settings);
                            }),
                    says("ranks drew other tokens"));
}

TEST_CASE("generate on ranks: what ends a rank ends all requests", "[generate]") {
  for (const std::string transport : {"threads", "shm"}) {
    CHECK_THROWS_WITH(on_mesh(2, transport,
                              [&](SmallText& model, World& world) {
                                int64_t passes = 0;
                                Engine engine(
                                    [&](const at::Tensor& ids) {
                                      if (world.rank() == 1 && ++passes == 9) throw std::runtime_error("the rank is lost");
                                      return model.forward(ids);
                                    },
                                    &model, {});
                                auto first = engine.submit({.prompt = {1, 2, 3}, .settings = kSettings});
                                auto second = engine.submit({.prompt = {4}, .settings = kSettings});
                                try {
                                  first.get();
                                } catch (const std::exception&) {
                                  require(second.ready(), "test", "a request goes on");
                                  second.get();
                                }
                                fail("test", "no request failed");
                              }),
                      says("the rank is lost") || says("rank"));
  }
}
