// Beam search against one that keeps whole sequences.
#include "tests/support/generate_support.hpp"

#include <dtensor/generate/beam_search.hpp>

using namespace dtensor;
using namespace dtensor::test;
using generate::Beam;
using generate::BeamOptions;
using generate::Engine;
using generate::Tokens;

namespace {

// By the model's own forward, without pages: beams are whole sequences.
std::vector<Beam> search_slowly(SmallText& model, const Tokens& prompt, const BeamOptions& options) {
  const torch::NoGradGuard no_grad;
  struct Open {
    Tokens tokens;
    double logprob;
  };
  std::vector<Open> open{{prompt, 0}};
  std::vector<Beam> ended;
  const auto score = [&](double logprob, size_t count) { return logprob / std::pow(static_cast<double>(count), options.length_penalty); };
  const auto end = [&](const Open& beam) {
    const Tokens tokens(beam.tokens.begin() + static_cast<int64_t>(prompt.size()), beam.tokens.end());
    ended.push_back({tokens, beam.logprob, score(beam.logprob, tokens.size())});
  };
  const auto sort = [&] { std::ranges::stable_sort(ended, [](const Beam& a, const Beam& b) { return a.score > b.score; }); };
  for (int64_t count = 1; count <= options.max_tokens; ++count) {
    std::vector<Open> all, next;
    for (const auto& beam : open) {
      const auto scores = model.forward(torch::tensor(beam.tokens, at::kLong).unsqueeze(0))[0][-1].log_softmax(-1);
      for (int64_t token = 0; token < kVocabulary; ++token) {
        all.push_back({beam.tokens, beam.logprob + scores[token].item<double>()});
        all.back().tokens.push_back(token);
      }
    }
    std::ranges::stable_sort(all, [](const Open& a, const Open& b) { return a.logprob > b.logprob; });
    for (int64_t rank = 0; rank < static_cast<int64_t>(all.size()) && static_cast<int64_t>(next.size()) < options.width; ++rank) {
      const bool stops = std::ranges::count(options.stop_tokens, all[rank].tokens.back()) > 0;
      if (stops && rank < options.width) end(all[rank]);
      if (!stops) next.push_back(all[rank]);
    }
    open = next;
    sort();
    if (static_cast<int64_t>(ended.size()) > options.width) ended.resize(options.width);
    if (static_cast<int64_t>(ended.size()) == options.width && score(open[0].logprob, count) <= ended.back().score) {
      open.clear();
      break;
    }
  }
  for (const auto& beam : open) end(beam);
  sort();
  ended.resize(std::min<size_t>(ended.size(), options.n));
  return ended;
}

}  // namespace

TEST_CASE("generate beam search: the beams of whole sequences", "[generate]") {
  SmallText model;
  const auto prompts = some_prompts(5, 6, 20);
  Engine measure(model);
  for (const auto& options :
       {BeamOptions{.width = 3, .max_tokens = 12, .n = 3}, BeamOptions{.width = 4, .max_tokens = 20, .stop_tokens = {2, 5, 9}, .n = 4},
        BeamOptions{.width = 1, .max_tokens = 8},
        BeamOptions{.width = 5, .max_tokens = 9, .stop_tokens = {1}, .length_penalty = 0, .n = 2}}) {
    for (const int64_t blocks : {1000, 16}) {
      Engine engine(model, {.cache_bytes = blocks * measure.runner().bytes_of_block(), .tokens_per_step = 7});
      auto other = engine.submit({.prompt = prompts[0], .settings = {.max_tokens = 20}});
      engine.step();
      for (const auto& prompt : prompts) {
        const auto got = generate::beam_search(engine, prompt, options), expected = search_slowly(model, prompt, options);
        REQUIRE(got.size() == expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
          CHECK(got[i].tokens == expected[i].tokens);
          CHECK(std::abs(got[i].score - expected[i].score) < 1e-10);
        }
      }
      require_same(other.get().outputs[0], decode_slowly(model, prompts[0], {.max_tokens = 20}), "beside beams");
      CHECK(engine.blocks_unused() == engine.blocks());
    }
  }
}

TEST_CASE("generate beam search: bad options are refused", "[generate]") {
  SmallText model;
  Engine engine(model);
  refuses("got a width of 0 beams; expected 1 to", [&] { generate::beam_search(engine, {1}, {.width = 0}); });
  refuses("got 3 results of 2 beams; expected 1 to 2", [&] { generate::beam_search(engine, {1}, {.width = 2, .n = 3}); });
  refuses("empty prompt", [&] { generate::beam_search(engine, {}, {}); });
  for (const auto penalty : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    refuses("length penalty", [&] { generate::beam_search(engine, {1}, {.length_penalty = penalty}); });
  }
  Engine small(model, {.cache_bytes = 4 * engine.runner().bytes_of_block()});
  refuses("have no room", [&] { generate::beam_search(small, {1, 2, 3}, {.width = 8, .max_tokens = 20}); });
  CHECK(small.blocks_unused() == small.blocks());
}

TEST_CASE("generate beam search: scores that are no numbers are refused", "[generate]") {
  SmallText model;
  Engine engine(model);
  {
    const torch::NoGradGuard no_grad;
    model.words->weight[7].fill_(std::nan(""));
  }
  refuses("scores after 3 tokens have NaN", [&] { generate::beam_search(engine, {1, 7, 3}, {.width = 2, .max_tokens = 4}); });
  CHECK(engine.blocks_unused() == engine.blocks());
}

TEST_CASE("generate beam search: ranks that ask for other beams all throw", "[generate]") {
  for (const auto& [name, options] : {std::pair{"another width", std::pair{BeamOptions{.width = 2}, BeamOptions{.width = 3}}},
                                      std::pair{"another length penalty", std::pair{BeamOptions{}, BeamOptions{.length_penalty = 0.5}}}}) {
    REQUIRE_NOTHROW(on_ranks(2, [&, name = name, options = options](World& world) {
      const auto mesh = init_device_mesh(c10::kCPU, {2}, {"tp"});
      const Spmd spmd(mesh);
      SmallText model;
      parallelize_module(model, mesh, automatic_plan(model));
      Engine engine(model);
      refuses(name, [&] { generate::beam_search(engine, {1, 2}, world.rank() == 0 ? options.first : options.second); });
    }));
  }
}
