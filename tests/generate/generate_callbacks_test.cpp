// Calls into the engine from callbacks.
#include "tests/support/generate_support.hpp"

#include <dtensor/generate/beam_search.hpp>

using namespace dtensor;
using namespace dtensor::test;
using generate::Engine;
using generate::Finish;
using generate::Piece;
using generate::Settings;

namespace {

const Settings kCalled{.temperature = 0.9, .max_tokens = 10, .seed = 4, .n = 2};

}  // namespace

TEST_CASE("generate callbacks: what would run a pass inside of a pass is refused", "[generate]") {
  SmallText model;
  Engine engine(model);
  const auto expected = engine.generate({{1, 2, 3}}, kCalled)[0];
  std::vector<std::string> texts;
  auto other = engine.submit({.prompt = {4, 5}, .settings = kCalled});
  int64_t pieces = 0;
  const auto on_piece = [&](const Piece&) {
    const std::vector<std::function<void()>> calls{[&] { engine.generate({{1}}, kCalled); }, [&] { engine.step(); }, [&] { other.get(); },
                                                   [&] { engine.load_weights(1); },
                                                   [&] {
                                                     generate::beam_search(engine, {1, 2});
                                                   }};
    try {
      calls[pieces++ % calls.size()]();
    } catch (const Error& error) {
      texts.push_back(error.what_without_backtrace());
    }
  };
  const auto got = engine.submit({.prompt = {1, 2, 3}, .settings = kCalled, .on_piece = on_piece}).get();
  for (int64_t i = 0; i < 2; ++i) require_same(got.outputs[i], expected.outputs[i], "with calls");
  CHECK(pieces == 20);
  REQUIRE(texts.size() == 20);
  for (const auto& text : texts) CHECK(text.find("was called from a callback") != std::string::npos);
  for (const auto& output : other.get().outputs) CHECK(output.tokens.size() == 10);
  CHECK(engine.version() == 0);
  CHECK(engine.blocks_unused() == engine.blocks());
}

TEST_CASE("generate callbacks: cancel and abort end requests when the pass is over", "[generate]") {
  SmallText model;
  for (const bool all : {false, true}) {
    for (const int64_t at : {1, 2, 3, 7}) {  // the first piece comes before the second output is there
      CAPTURE(all, at);
      Engine engine(model);
      std::optional<generate::Future> own, beside;
      int64_t pieces = 0;
      own = engine.submit({.prompt = {1, 2, 3}, .settings = kCalled, .on_piece = [&](const Piece&) {
                             if (++pieces != at) return;
                             if (all) {
                               engine.abort();
                             } else {
                               own->cancel();
                               beside->cancel();
                             }
                             beside.reset();  // nobody else holds it
                           }});
      beside = engine.submit({.prompt = {4, 5}, .settings = kCalled});
      while (!engine.idle()) engine.step();
      CHECK(pieces == at);
      const auto got = own->get();
      CHECK(got.outputs.size() == 2);
      int64_t tokens = 0;
      for (const auto& output : got.outputs) {
        CHECK(output.finish == (all ? Finish::aborted : Finish::cancelled));
        CHECK(output.tokens.size() == output.logprobs.size());
        tokens += static_cast<int64_t>(output.tokens.size());
      }
      CHECK(tokens == at);
      CHECK(engine.blocks_unused() == engine.blocks());
    }
  }
}

TEST_CASE("generate callbacks: allowed may cancel and a callback may submit", "[generate]") {
  SmallText model;
  Engine engine(model);
  std::optional<generate::Future> own, later;
  auto settings = kCalled;
  int64_t asked = 0, pieces = 0;
  settings.allowed = [&](auto, std::vector<bool>&) {
    if (++asked == 5) own->cancel();
  };
  own = engine.submit({.prompt = {1, 2, 3}, .settings = settings, .on_piece = [&](const Piece&) {
                         if (++pieces == 2) later = engine.submit({.prompt = {7, 8}, .settings = kCalled});
                       }});
  CHECK(own->get().outputs[0].finish == Finish::cancelled);
  CHECK(pieces == 4);
  require_same(later->get().outputs[1], decode_slowly(model, {7, 8}, kCalled, 1), "submitted by a callback");
  CHECK(engine.blocks_unused() == engine.blocks());
}
