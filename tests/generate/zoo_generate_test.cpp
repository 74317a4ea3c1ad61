// The zoo's models of text: log-probabilities of generation are training's, bit for bit.
#include "tests/support/generate_support.hpp"

#include "examples/zoo/zoo.hpp"

#include <dtensor/parallel/expert/expert_parallel.hpp>

using namespace dtensor;
using namespace dtensor::test;
using generate::BatchInvariant;
using generate::Engine;
using generate::Tokens;

namespace {

const generate::Settings kOfZoo{.temperature = 0.8, .max_tokens = 24, .seed = 3};

// Prompts of several lengths.
std::vector<Tokens> zoo_prompts() {
  std::vector<Tokens> prompts;
  for (const int64_t length : {1, 7, 20, 33}) {
    auto& prompt = prompts.emplace_back();
    for (int64_t i = 0; i < length; ++i) prompt.push_back((i * 37 + length * 11) % 256);
  }
  return prompts;
}

std::shared_ptr<zoo::Model> zoo_model(const std::string& name, at::ScalarType dtype) {
  torch::manual_seed(5);
  auto model = zoo::find(name).make();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.mul_(3);  // so that tokens are not alike
  model->to(dtype);
  return model;
}

// Throws unless one forward of all sequences as a batch, as training does it, has the log-probabilities of the outputs.
void require_bits_of_training(zoo::Model& model, const std::vector<Tokens>& prompts, const std::vector<generate::Completion>& got) {
  std::vector<Tokens> sequences;
  size_t longest = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto& all = sequences.emplace_back(prompts[i]);
    const auto& tokens = got[i].outputs[0].tokens;
    all.insert(all.end(), tokens.begin(), tokens.end());
    longest = std::max(longest, all.size());
  }
  std::vector<at::Tensor> rows;
  for (auto& sequence : sequences) {
    sequence.resize(longest, 0);
    const NoSpmd plain;
    rows.push_back(torch::tensor(sequence, at::kLong));
  }
  const BatchInvariant region;
  auto ids = [&] {
    const NoSpmd plain;
    return torch::stack(rows);
  }();
  if (const auto* mesh = Spmd::current()) ids = distribute_tensor(ids, *mesh, Placements(mesh->ndim(), replicate()));
  const auto scores = full_tensor(model.forward(ids)).detach();
  const NoSpmd plain;
  const auto logprobs = scores.log_softmax(-1);
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto& output = got[i].outputs[0];
    for (size_t j = 0; j < output.tokens.size(); ++j) {
      const auto expected = logprobs[static_cast<int64_t>(i)][static_cast<int64_t>(prompts[i].size() + j) - 1][output.tokens[j]];
      require(output.logprobs[j] == expected.item<double>(), "test", "token {} of prompt {} has {}; expected {}", j, i, output.logprobs[j],
              expected.item<double>());
    }
  }
}

}  // namespace

TEST_CASE("generate zoo: log-probabilities have the bits of training", "[generate]") {
  for (const std::string name : {"llama3-debug", "gpt2-debug", "mixtral-debug", "qwen3-moe-debug", "deepseek-debug"}) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      CAPTURE(name, c10::toString(dtype));
      const auto model = zoo_model(name, dtype);
      for (const auto& options : {generate::EngineOptions{.batch_invariant = true},
                                  generate::EngineOptions{.tokens_per_step = 11, .chunk = 5, .batch_invariant = true}}) {
        Engine engine(*model, options);
        REQUIRE(engine.runner().pages());
        const auto prompts = zoo_prompts();
        REQUIRE_NOTHROW(require_bits_of_training(*model, prompts, engine.generate(prompts, kOfZoo)));
        for (const auto& prompt : prompts) REQUIRE_NOTHROW(require_bits_of_training(*model, {prompt}, engine.generate({prompt}, kOfZoo)));
      }
    }
  }
}

TEST_CASE("generate zoo: log-probabilities have the bits of training on ranks", "[generate]") {
  for (const std::string name : {"llama3-debug", "gpt2-debug", "mixtral-debug", "deepseek-debug"}) {
    for (const std::string transport : {"threads", "shm"}) {
      CAPTURE(name, transport);
      REQUIRE_NOTHROW(on_ranks(
          2,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {2}, {"tp"});
            const Spmd spmd(mesh);
            for (const auto dtype : {at::kFloat, at::kDouble}) {
              const auto model = zoo_model(name, dtype);
              parallelize_module(*model, mesh, automatic_plan(*model));
              if (name == "mixtral-debug" || name == "deepseek-debug") expert_parallel(*model, mesh, {.dims = {"tp"}});
              Engine engine(*model, {.tokens_per_step = 24, .batch_invariant = true});
              require(engine.runner().pages(), "test", "no pages");
              require_bits_of_training(*model, zoo_prompts(), engine.generate(zoo_prompts(), kOfZoo));
            }
          },
          transport));
    }
  }
}

// With few rows queries lie in another way there than with many.
TEST_CASE("generate zoo: ranks that do not divide the heads have the tokens of one device", "[generate]") {
  for (const std::string name : {"llama3-debug", "deepseek-debug"}) {
    const auto expected = Engine(*zoo_model(name, at::kDouble)).generate(zoo_prompts(), kOfZoo);
    for (const std::string transport : {"threads", "shm"}) {
      for (const int ranks : {3, 5}) {
        CAPTURE(name, transport, ranks);
        REQUIRE_NOTHROW(on_ranks(
            ranks,
            [&](World&) {
              const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"tp"});
              const Spmd spmd(mesh);
              const auto model = zoo_model(name, at::kDouble);
              parallelize_module(*model, mesh, automatic_plan(*model));
              Engine engine(*model);
              require(engine.runner().pages(), "test", "no pages: {}", engine.runner().why_not());
              const auto got = engine.generate(zoo_prompts(), kOfZoo);
              for (size_t i = 0; i < got.size(); ++i)
                require(got[i].outputs[0].tokens == expected[i].outputs[0].tokens, "test", "other tokens of prompt {}", i);
            },
            transport));
      }
    }
  }
}
