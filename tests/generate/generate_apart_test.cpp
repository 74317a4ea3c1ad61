// Text from a model whose experts lie on ranks of their own, against one device.
#include "tests/support/apart_training.hpp"

#include <dtensor/generate/engine.hpp>
#include <dtensor/generate/ping_pong.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace dtensor::test::apart {

namespace {

using generate::Tokens;

nn::MoEOptions text_options() {
  auto options = Case().options;
  options.shared_hidden = 5;
  return options;
}

// So that tokens are not alike.
void make_lively(Model& model) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) parameter.mul_(3);
}

std::vector<Tokens> apart_prompts() {
  std::vector<Tokens> prompts;
  for (int64_t i = 0; i < 7; ++i) {
    auto& prompt = prompts.emplace_back();
    for (int64_t j = 0; j < 1 + 5 * i % 13; ++j) prompt.push_back((3 * i + 5 * j) % kWords);
  }
  return prompts;
}

generate::Settings apart_settings() { return {.temperature = 0.9, .max_tokens = 12, .seed = 5, .n = 2, .prompt_logprobs = true}; }

std::vector<generate::Completion> completions_of_one_device(const generate::EngineOptions& options) {
  torch::manual_seed(1);
  const auto model = std::make_shared<Model>(text_options(), 0);
  model->to(at::kDouble);
  make_lively(*model);
  generate::Engine engine(*model, options);
  return engine.generate(apart_prompts(), apart_settings());
}

void check_completions(const std::vector<generate::Completion>& got, const std::vector<generate::Completion>& expected) {
  require(got.size() == expected.size(), "test", "{} completions", got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    for (size_t j = 0; j < expected[i].outputs.size(); ++j) {
      const auto &a = got[i].outputs.at(j), &b = expected[i].outputs[j];
      require(a.tokens == b.tokens, "test", "output {} of prompt {} has tokens {}, expected {}", j, i, fmt::join(a.tokens, " "),
              fmt::join(b.tokens, " "));
      const auto close = [](double x, double y) { return std::abs(x - y) < 1e-12; };
      require(std::ranges::equal(a.logprobs, b.logprobs, close), "test", "log-probabilities {}, expected {}", fmt::join(a.logprobs, " "),
              fmt::join(b.logprobs, " "));
    }
  }
}

// Attention is tensor parallel.
DisaggregatedMeshes text_meshes(const std::vector<int>& attention, const std::vector<int>& experts) {
  const auto mesh = [](const std::vector<int>& ranks, const char* name) {
    return DeviceMesh(c10::kCPU, ranks, {static_cast<int64_t>(ranks.size())}, {name});
  };
  return {mesh(attention, "tp"), mesh(experts, "ep")};
}

std::shared_ptr<Model> text_model(const DisaggregatedMeshes& meshes, const DeviceMesh& own) {
  torch::manual_seed(1);
  std::shared_ptr<Model> model;
  {
    const DeferredInit deferred(own);
    model = std::make_shared<Model>(text_options(), 0);
    model->to(at::kDouble);
    make_lively(*model);
  }
  if (meshes.experts.contains_this_rank()) {
    expert_parallel(*model, own);
  } else {
    parallelize_module(*model, own,
                       tensor_parallel({{"*.wq", ColwiseParallel()}, {"*.wo", RowwiseParallel()}}));
  }
  return model;
}

}  // namespace

TEST_CASE("generate apart: tokens and log-probabilities are those of one device", "[generate][experts][pipeline]") {
  for (const auto& options : {generate::EngineOptions{.split_over = ""}, {.cache_bytes = 20000, .tokens_per_step = 9, .split_over = ""}}) {
    const auto expected = completions_of_one_device(options);
    for (const std::string transport : {"threads", "shm"}) {
      for (const auto& [attention, experts] : std::vector<std::pair<std::vector<int>, std::vector<int>>>{
               {{0}, {1}}, {{0}, {1, 2, 3}}, {{0, 1}, {2}}, {{0, 1}, {2, 3}}}) {
        for (const int microbatches : {1, 3}) {
          CAPTURE(transport, attention, experts, microbatches, options.tokens_per_step);
          REQUIRE_NOTHROW(on_ranks(
              static_cast<int>(attention.size() + experts.size()),
              [&](World&) {
                const auto meshes = text_meshes(attention, experts);
                const auto own = stage_mesh({meshes.attention, meshes.experts});
                const Spmd spmd(own);
                const auto model = text_model(meshes, own);
                auto pipe = disaggregate(*model, meshes, model->pieces_apart(), {.microbatches = microbatches});
                pipe.materialize();
                generate::PingPong passes(pipe);
                if (meshes.experts.contains_this_rank()) return passes.serve();
                generate::Engine engine(passes.forward(), model.get(), options);
                require(engine.runner().pages(), "test", "no pages: {}", engine.runner().why_not());
                check_completions(engine.generate(apart_prompts(), apart_settings()), expected);
                passes.end();
              },
              transport));
        }
      }
    }
  }
}

TEST_CASE("generate apart: rows in parts of whole sequences", "[generate]") {
  const generate::Block a = 0, b = 1, c = 2;
  const generate::StepRows rows{{1, 2, 3, 4, 5, 6}, {0, 1, 2, 9, 10, 4}, {{0, 3, 0, &a, nullptr}, {3, 4, 9, &b, nullptr},
                                {4, 5, 10, &b, nullptr}, {5, 6, 4, &c, nullptr}}, {2, 4, 5}};
  const auto parts = generate::in_parts(rows, 2);
  REQUIRE(parts.size() == 2);
  CHECK(parts[0].ids == Tokens{1, 2, 3});
  CHECK(parts[0].scored == Tokens{2});
  CHECK(parts[1].ids == Tokens{4, 5, 6});
  CHECK(parts[1].positions == Tokens{9, 10, 4});
  CHECK(parts[1].scored == Tokens{1, 2});
  CHECK(parts[1].spans[1].begin == 1);
  CHECK(generate::in_parts(rows, 5).size() == 3);  // one for each sequence
  CHECK(generate::in_parts(rows, 1).front().ids == rows.ids);
  CHECK(generate::in_parts({}, 2).empty());
}

TEST_CASE("generate apart: what is refused", "[generate][experts][pipeline][errors]") {
  const auto refused = [](const std::function<void(generate::PingPong&, int rank)>& f, const std::string& message) {
    CHECK_THROWS_WITH(on_ranks(2,
                               [&](World& world) {
                                 const auto meshes = text_meshes({0}, {1});
                                 const auto own = stage_mesh({meshes.attention, meshes.experts});
                                 const Spmd spmd(own);
                                 const auto model = text_model(meshes, own);
                                 auto pipe = disaggregate(*model, meshes, model->pieces_apart(), {.microbatches = 2});
                                 generate::PingPong passes(pipe);
                                 f(passes, world.rank());
                               }),
                      says(message));
  };
  refused([](auto& passes, int) { passes.serve(); }, "serve() is for the experts' ranks; this one is in DeviceMesh(cpu, tp=1, ranks=[0])");
  refused([](auto& passes, int) { passes.end(); }, "end() is for attention's ranks; this one is in DeviceMesh(cpu, ep=1, ranks=[1])");
}

}  // namespace dtensor::test::apart
