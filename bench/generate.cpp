// Generation: tokens a second at several batch sizes and with lengths alike and skewed, the time to the first token, passes for each token,
// how full the cache is, what bits that do not depend on the batch cost, a draw, and two ranks beside one. A Llama of 4.4 million
// parameters; prompts of 16 tokens. DTENSOR_BENCH_MODEL is a folder of peers/torch_generate.py, whose weights, prompts and lengths are
// then taken.
#include "main.hpp"
#include "ranks.hpp"

#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/dtensor.hpp>
#include <dtensor/generate/drafters.hpp>
#include <dtensor/generate/engine.hpp>
#include <dtensor/generate/paged_attention.hpp>

#include "examples/zoo/huggingface.hpp"
#include "examples/zoo/llama3.hpp"

#include <nlohmann/json.hpp>
#include <torch/types.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

namespace {

using namespace dtensor::generate;

constexpr int64_t kVocabulary = 64, kPrompt = 16;

const char* folder() { return std::getenv("DTENSOR_BENCH_MODEL"); }

std::string read(const std::string& name) {
  std::ifstream in(std::string(folder()) + "/" + name);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::shared_ptr<zoo::Model> make_model() {
  torch::manual_seed(0);
  if (!folder()) return zoo::Llama3(zoo::Llama3Options{kVocabulary, 6, 256, 8, 4, 688, 1e-5, false, {10000, std::nullopt}}).ptr();
  const auto config = read("config.json");
  auto model = zoo::model_from_config(config);
  zoo::load(*model, config, dtensor::checkpoints::read_huggingface(folder()));
  return model;
}

zoo::Model& model() {
  static const auto model = make_model();
  return *model;
}

Tokens random_prompt(std::mt19937_64& random) {
  Tokens tokens(kPrompt);
  for (auto& token : tokens) token = static_cast<int64_t>(random() % kVocabulary);
  return tokens;
}

std::vector<Tokens> prompts(int64_t count) {
  if (folder()) {
    auto all = nlohmann::json::parse(read("prompts.json")).get<std::vector<Tokens>>();
    all.resize(count);
    return all;
  }
  std::mt19937_64 random(1);
  std::vector<Tokens> all(count);
  for (auto& tokens : all) tokens = random_prompt(random);
  return all;
}

void report(benchmark::State& state, const Engine& engine) {
  const auto counts = engine.counts();
  state.counters["tokens_per_s"] = benchmark::Counter(static_cast<double>(counts.tokens), benchmark::Counter::kIsRate);
  state.counters["passes_per_token"] = static_cast<double>(counts.passes) / static_cast<double>(counts.tokens);
  state.counters["cache_used"] = static_cast<double>(counts.most_blocks) / static_cast<double>(engine.blocks());
}

// 64 new tokens for each of range(0) prompts, greedy. range(1): batch_invariant.
void equal_lengths(benchmark::State& state) {
  Engine engine(model(), {.max_requests = state.range(0), .share_prefixes = false, .batch_invariant = state.range(1) != 0});
  const auto all = prompts(state.range(0));
  for (auto _ : state) engine.generate(all, {.temperature = 0, .max_tokens = 64});
  report(state, engine);
}
BENCHMARK(equal_lengths)
    ->ArgNames({"batch", "invariant"})
    ->ArgsProduct({{1, 16, 64}, {0, 1}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

// The same on range(0) ranks that share 64 prompts out over dp.
void groups(benchmark::State& state) {
  const auto ranks = static_cast<int>(state.range(0));
  const auto all = prompts(64);
  bench::on_ranks(state, ranks, "threads", [&](dtensor::World&) -> std::function<void()> {
    struct Rank {
      dtensor::DeviceMesh mesh;
      dtensor::Spmd spmd{mesh};
      std::shared_ptr<zoo::Model> model = make_model();
      Engine engine{*model, {.max_requests = 32, .share_prefixes = false}};
    };
    auto rank = std::make_shared<Rank>(dtensor::init_device_mesh(c10::kCPU, {ranks}, {"dp"}));
    return [rank, &all] { rank->engine.generate(all, {.temperature = 0, .max_tokens = 64}); };
  });
  state.counters["tokens_per_s"] = benchmark::Counter(64.0 * 64.0 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}
BENCHMARK(groups)->ArgName("ranks")->Arg(1)->Arg(2)->MinTime(2)->Unit(benchmark::kMillisecond)->UseRealTime();

std::vector<int64_t> skewed(int64_t count) {
  if (folder()) return nlohmann::json::parse(read("lengths.json")).get<std::vector<int64_t>>();
  std::mt19937_64 random(2);
  std::lognormal_distribution<double> lengths(3, 1);
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(std::clamp<int64_t>(static_cast<int64_t>(lengths(random)), 1, 256));
  return all;
}

// 64 outputs of lognormal lengths on 16 slots. range(0): 1 continuous; 0 static, where a batch lasts as long as its longest output.
void skewed_lengths(benchmark::State& state) {
  Engine engine(model(), {.max_requests = 16, .share_prefixes = false});
  const auto lengths = skewed(64);
  const auto all = prompts(64);
  int64_t useful = 0;
  for (auto _ : state) {
    std::vector<Future> futures;
    for (size_t i = 0; i < lengths.size(); ++i) {
      useful += lengths[i];
      auto settings = Settings{.temperature = 0, .max_tokens = lengths[i]};
      if (state.range(0) == 0) {  // every slot is computed until the last of its batch has ended
        const auto batch = std::span(lengths).subspan(i / 16 * 16, std::min<size_t>(16, lengths.size() - i / 16 * 16));
        settings.max_tokens = std::ranges::max(batch);
      }
      futures.push_back(engine.submit({all[i], settings}));
      if (state.range(0) == 0 && i % 16 == 15) {
        for (auto& future : futures) future.get();
      }
    }
    for (auto& future : futures) future.get();
  }
  report(state, engine);
  state.counters["tokens_per_s"] = benchmark::Counter(static_cast<double>(useful), benchmark::Counter::kIsRate);
}
BENCHMARK(skewed_lengths)->ArgName("continuous")->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond)->UseRealTime();

// Of a prompt of range(0) tokens.
void first_token(benchmark::State& state) {
  Engine engine(model(), {.share_prefixes = false});
  std::mt19937_64 random(4);
  for (auto _ : state) {
    Tokens tokens(state.range(0));
    for (auto& token : tokens) token = static_cast<int64_t>(random() % kVocabulary);
    engine.generate({tokens}, {.max_tokens = 1});
  }
}
BENCHMARK(first_token)->Arg(16)->Arg(512)->Unit(benchmark::kMillisecond)->UseRealTime();

// Guesses from earlier outputs, in the second epoch of the same prompts, of a policy of low entropy.
void second_epoch(benchmark::State& state) {
  Engine engine(model(), {.drafter = state.range(0) ? std::make_shared<RolloutTrees>() : nullptr, .drafts = 16});
  const auto all = prompts(4);
  uint64_t seed = 0;
  const auto epoch = [&] { engine.generate(all, {.temperature = 0.02, .max_tokens = 64, .seed = ++seed, .n = 4}); };
  epoch();
  const auto before = engine.counts();
  for (auto _ : state) epoch();
  const auto after = engine.counts();
  const auto tokens = static_cast<double>(after.tokens - before.tokens);
  state.counters["tokens_per_s"] = benchmark::Counter(tokens, benchmark::Counter::kIsRate);
  state.counters["tokens_per_pass"] = tokens / static_cast<double>(after.sequence_passes - before.sequence_passes);
}
BENCHMARK(second_epoch)->ArgName("guesses")->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond)->UseRealTime();

// Attention of one decode step over range(0) positions: 8 heads, 2 key heads of 128, 16 sequences. `of_memory`: the time that it takes to
// read the same bytes, by a sum, beside it.
void decode_attention(benchmark::State& state) {
  const int64_t sequences = 16, length = state.range(0), blocks = length / kBlockRows * sequences;
  const LayerShape shape{2, 128, 128, at::kFloat};
  const Pages pages(shape, blocks);
  pages.keys().normal_();
  pages.values().normal_();
  std::vector<Block> table(blocks);
  std::iota(table.begin(), table.end(), 0);
  std::vector<RowSpan> spans;
  for (int64_t i = 0; i < sequences; ++i) spans.push_back({i, i + 1, length - 1, table.data() + i * length / kBlockRows, nullptr});
  const auto q = torch::randn({sequences, 8, 128});
  const auto now = [] { return std::chrono::steady_clock::now(); };
  double reading = 0, attending = 0;
  for (auto _ : state) {
    const auto start = now();
    benchmark::DoNotOptimize(pages.attend(q, spans, 0.1));
    const auto middle = now();
    benchmark::DoNotOptimize(pages.keys().sum() + pages.values().sum());
    attending += std::chrono::duration<double>(middle - start).count();
    reading += std::chrono::duration<double>(now() - middle).count();
  }
  state.counters["of_memory"] = attending / reading;
  state.counters["GB_per_s"] = static_cast<double>(state.iterations() * blocks * shape.bytes_of_block()) / attending / 1e9;
}
BENCHMARK(decode_attention)->Arg(512)->Arg(4096)->Unit(benchmark::kMillisecond)->UseRealTime();

// Of a token, from scores of 128256 tokens like a model's. `of_definition`: the share of the time that the definition takes, beside it.
void draw(benchmark::State& state) {
  const Settings all[] = {{.temperature = 0}, {.temperature = 0.8}, {.top_k = 50}, {.top_p = 0.95}, {.min_p = 0.05}};
  const auto& settings = all[state.range(0)];
  std::mt19937_64 random(6);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> scores(128'256);
  for (auto& score : scores) score = normal(random);
  const std::span<const float> row(scores);
  const Tokens tokens{0};
  const auto now = [] { return std::chrono::steady_clock::now(); };
  double quick = 0, defined = 0;
  int64_t position = 0;
  for (auto _ : state) {
    const auto uniform = uniform_of(1, 0, ++position);
    const auto start = now();
    benchmark::DoNotOptimize(draw_token(row, settings, tokens, 1, uniform));
    const auto middle = now();
    benchmark::DoNotOptimize(Distribution::by_definition(row, settings, tokens, 1).draw(uniform));
    const auto end = now();
    quick += std::chrono::duration<double>(middle - start).count();
    defined += std::chrono::duration<double>(end - middle).count();
    state.SetIterationTime(std::chrono::duration<double>(middle - start).count());
  }
  state.counters["of_definition"] = quick / defined;
}
BENCHMARK(draw)->ArgName("greedy_temperature_k_p_min")->DenseRange(0, 4)->Unit(benchmark::kMicrosecond)->UseManualTime();

}  // namespace
