// A small Mixtral with attention on the first ranks and experts on the others, trained beside one device. Then it writes.
//
//   ./experts_apart --ranks 4
#include "text_data.hpp"
#include "zoo/llama3.hpp"

#include <ATen/Parallel.h>
#include <dtensor/dtensor.hpp>
#include <dtensor/generate/engine.hpp>
#include <dtensor/generate/ping_pong.hpp>
#include <dtensor/pipeline/disaggregate.hpp>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <stdexcept>

namespace dt = dtensor;

namespace {

constexpr int kSteps = 20, kMicrobatches = 3, kExperts = 4;

std::shared_ptr<zoo::Llama3Impl> make_model() {
  torch::manual_seed(0);
  auto model = std::make_shared<zoo::Llama3Impl>(
      zoo::Llama3Options{.vocabulary = 256, .layers = 2, .dim = 64, .heads = 4, .kv_heads = 2, .hidden = 96, .experts = kExperts});
  model->to(torch::kDouble);
  return model;
}

torch::optim::AdamW make_optimizer(const std::vector<torch::Tensor>& parameters) {
  return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(3e-3));
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& targets) { return zoo::loss(scores, targets) / kMicrobatches; }

std::vector<double> train_on_one_device(const TextData& text) {
  const auto model = make_model();
  dt::nn::set_loss_scale(*model, 1.0 / kMicrobatches);
  auto optimizer = make_optimizer(model->parameters());
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto [ids, targets] = text.batch(0, step, 6, 32);
    const auto x = ids.chunk(kMicrobatches), y = targets.chunk(kMicrobatches);
    optimizer.zero_grad();
    losses.push_back(0);
    for (int i = 0; i < kMicrobatches; ++i) {
      const auto loss = loss_of(model->forward(x[i]), y[i]);
      loss.backward();
      losses.back() += loss.item<double>();
    }
    optimizer.step();
  }
  return losses;
}

// The first ranks, and as many others as experts can be shared by alike, at most half of all.
dt::DisaggregatedMeshes meshes_of(int ranks) {
  if (ranks < 2) throw std::invalid_argument("attention and experts need a rank each; hint: --ranks 2");
  int experts = std::min(ranks / 2, kExperts);
  while (kExperts % experts != 0) --experts;
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  const auto mesh = [](std::vector<int> of) { return dt::DeviceMesh(torch::kCPU, of, {static_cast<int64_t>(of.size())}, {"dp"}); };
  return {mesh({all.begin(), all.end() - experts}), mesh({all.end() - experts, all.end()})};
}

// The losses; and on attention's ranks, what the model writes.
std::pair<std::vector<double>, std::string> train_apart(const TextData& text, const dt::DisaggregatedMeshes& meshes) {
  const auto own = dt::stage_mesh({meshes.attention, meshes.experts});
  const dt::Spmd spmd(own);
  const auto model = [&] {
    const dt::DeferredInit deferred(own);
    return make_model();
  }();
  if (meshes.experts.contains_this_rank()) dt::expert_parallel(*model, own, {.dims = {"dp"}});
  auto pipe = dt::disaggregate(*model, meshes, model->pieces_apart(), {.microbatches = kMicrobatches});
  pipe.materialize();
  dt::nn::set_loss_scale(*model, 1.0 / kMicrobatches);
  auto optimizer = make_optimizer(pipe.parameters());
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto [ids, targets] = text.batch(0, step, 6, 32);
    auto x = ids.chunk(kMicrobatches), y = targets.chunk(kMicrobatches);
    for (auto* all : {&x, &y}) {
      for (auto& part : *all) part = dt::distribute_tensor(part, own, {dt::shard(0)});
    }
    optimizer.zero_grad();
    losses.push_back(pipe.step(x, y, loss_of).loss);
    optimizer.step();
  }

  dt::generate::PingPong passes(pipe);
  if (meshes.experts.contains_this_rank()) {
    passes.serve();
    return {losses, ""};
  }
  dt::generate::Engine engine(passes.forward(), model.get(), {.split_over = ""});
  const auto completions = engine.generate({{'#', 'i', 'n'}, {'s', 't', 'd'}}, {.max_tokens = 20, .seed = 1});
  passes.end();
  return {losses, completions[0].outputs[0].text + completions[1].outputs[0].text};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && (std::string(argv[1]) == "--help" || std::string(argv[1]) == "-h")) {
    std::cout << "experts_apart [--ranks N]: trains a small mixture of experts with attention on the first ranks and experts on the\n"
                 "others, checks its losses against one device, and writes. N: 2 or more. For processes: dtensor-run -n N experts_apart\n";
    return 0;
  }
  at::set_num_threads(1);
  return dt::launch(argc, argv, [](dt::World& world) {
    const TextData text("");
    const auto meshes = meshes_of(world.size());
    const auto [losses, written] = train_apart(text, meshes);
    if (world.rank() != 0) return;
    const auto expected = train_on_one_device(text);
    double apart = 0;
    for (int i = 0; i < kSteps; ++i) apart = std::max(apart, std::abs(losses[i] / expected[i] - 1));
    std::cout << "attention on " << meshes.attention.size() << " ranks, experts on " << meshes.experts.size() << ": losses "
              << losses.front() << " to " << losses.back() << ", apart from one device by " << apart << "; wrote " << written.size()
              << " bytes\n";
    if (!(apart < 1e-12) || written.empty()) throw std::runtime_error("these are not the losses of one device");
  });
}
