// Greedy tokens of a model in Hugging Face's form, against those of transformers: huggingface-tokens FOLDER, which has config.json,
// safetensors, prompts.json and tokens.json. Every batch size, cache and number of ranks has to give the same.
#include "examples/zoo/huggingface.hpp"

#include <ATen/Parallel.h>
#include <dtensor/dtensor.hpp>
#include <dtensor/generate/engine.hpp>
#include <nlohmann/json.hpp>

#include <fstream>
#include <iostream>
#include <iterator>

namespace dt = dtensor;
namespace gen = dtensor::generate;

namespace {

std::string read(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::shared_ptr<zoo::Model> load(const std::string& folder, const std::optional<dt::DeviceMesh>& mesh) {
  const auto config = read(folder + "/config.json");
  auto model = zoo::model_from_config(config);
  model->to(torch::kFloat64);
  if (mesh) dt::parallelize_module(*model, *mesh, dt::automatic_plan(*model));
  zoo::load(*model, config, dt::checkpoints::read_huggingface(folder));
  return model;
}

struct Way {
  const char* name;
  gen::EngineOptions options;
  bool preempts = false;
};

std::vector<Way> all_ways(int64_t bytes_of_block) {
  const auto few = 24 * bytes_of_block;
  return {{"batches of 1", {.max_requests = 1}},
          {"batches of 7", {.max_requests = 7}},
          {"batches of 16", {.max_requests = 16}},
          {"chunks", {.max_requests = 16, .tokens_per_step = 40, .chunk = 9}},
          {"no sharing", {.max_requests = 16, .share_prefixes = false}},
          {"preemption", {.cache_bytes = few, .max_requests = 16}, true},
          {"preemption, chunks, no sharing",
           {.cache_bytes = few, .max_requests = 16, .tokens_per_step = 40, .chunk = 9, .share_prefixes = false},
           true}};
}

void check(const std::string& folder, int ranks, dt::World& world) {
  std::optional<dt::DeviceMesh> mesh;
  if (ranks > 1) mesh = dt::init_device_mesh(torch::kCPU, {ranks}, {"tp"});
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);
  const auto model = load(folder, mesh);
  const auto prompts = nlohmann::json::parse(read(folder + "/prompts.json")).get<std::vector<gen::Tokens>>();
  const auto expected = nlohmann::json::parse(read(folder + "/tokens.json")).get<std::vector<gen::Tokens>>();
  const auto bytes_of_block = gen::Engine(*model).runner().bytes_of_block();
  for (const auto& [name, options, preempts] : all_ways(bytes_of_block)) {
    gen::Engine engine(*model, options);
    dt::require(engine.runner().pages(), "test", "no pages: {}", engine.runner().why_not());
    const gen::Settings greedy{.temperature = 0, .max_tokens = static_cast<int64_t>(expected[0].size())};
    auto got = engine.generate(prompts, greedy);
    for (auto& again : engine.generate(std::vector(prompts.begin(), prompts.begin() + 6), greedy)) got.push_back(std::move(again));
    size_t same = 0;
    for (size_t i = 0; i < got.size(); ++i) same += got[i].outputs[0].tokens == expected[i % prompts.size()] ? 1 : 0;
    const auto counts = engine.counts();
    if (world.rank() == 0) {
      std::cout << folder.substr(folder.rfind('/') + 1) << " on " << ranks << " ranks, " << name << ": " << same << " of " << got.size()
                << ", " << counts.passes << " passes, " << counts.preemptions << " preemptions, " << counts.blocks_found
                << " blocks shared\n";
    }
    dt::require(same == got.size(), "test", "{} ranks, {}: {} of {} outputs are those of transformers", ranks, name, same, got.size());
    dt::require((counts.preemptions > 0) == preempts, "test", "{} preemptions", counts.preemptions);
    dt::require((counts.blocks_found > 0) == options.share_prefixes, "test", "{} blocks were shared", counts.blocks_found);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  at::set_num_threads(1);
  for (int i = 1; i < argc; ++i) {
    for (const int ranks : {1, 2, 4}) {
      dt::LaunchOptions options;
      options.ranks = ranks;
      dt::launch(options, [&](dt::World& world) { check(argv[i], ranks, world); });
    }
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
