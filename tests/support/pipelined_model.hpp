// A small model, trained on one device and in a pipeline: what both give.
#pragma once

#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/pipeline.hpp>

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace dtensor::test::pipelined {

constexpr int64_t kWords = 11, kWidth = 8;

struct Block : torch::nn::Module {
  Block()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, 16))),
        down(register_module("down", torch::nn::Linear(16, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + torch::dropout(down(torch::gelu(up(norm(x)))), 0.25, is_training()); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};

// What reaches over stages: nothing, the embeddings as the head's weights, or also values of the first pieces.
enum class Reach { none, tied, skips };

struct Model : torch::nn::Module {
  explicit Model(int layers, Reach reach = Reach::none) : reach(reach) {
    words = register_module("words", torch::nn::Embedding(kWords, kWidth));
    for (int i = 0; i < layers; ++i) blocks->push_back(std::make_shared<Block>());
    register_module("blocks", blocks);
    if (reach == Reach::none) head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  std::vector<Piece> pieces() {
    const bool skips = reach == Reach::skips;
    std::vector<Piece> all;
    if (skips) {
      all.push_back(piece("words",
                          [this](const at::Tensor& ids) {
                            return std::vector{words(ids), words->weight * 2};
                          },
                          {.gives = {"twice"}}));
    } else {
      all.push_back(piece("words", [this](const at::Tensor& ids) { return words(ids); }));
    }
    for (size_t i = 0; i < blocks->size(); ++i) {
      const auto name = fmt::format("blocks.{}", i);
      const auto run = [this, i](const at::Tensor& x) { return blocks->ptr<Block>(i)->forward(x); };
      if (skips && i == 0) {
        all.push_back(piece(name, [run](const at::Tensor& x) { return std::vector{run(x), x.tanh()}; }, {.gives = {"first"}}));
      } else if (skips && i == 1) {
        const auto add = [run](const std::vector<at::Tensor>& x) { return run(x[0]) * x[1].sum(1).sigmoid().mean(); };
        all.push_back(piece(name, add, {.takes = {"twice"}}));
      } else if (skips && i + 1 == blocks->size()) {
        all.push_back(piece(name, [run](const std::vector<at::Tensor>& x) { return run(x[0] + x[1]); }, {.takes = {"first"}}));
      } else {
        all.push_back(piece(name, run));
      }
    }
    if (skips) {
      const auto scores = [](const std::vector<at::Tensor>& x) { return at::linear(x[0] + x[1], x[2]); };
      all.push_back(piece("", scores, {.takes = {"first", "twice"}}));
    } else if (reach == Reach::tied) {
      all.push_back(piece("words", [this](const at::Tensor& x) { return at::linear(x, words->weight); }));
    } else {
      all.push_back(piece("head", [this](const at::Tensor& x) { return head(x); }));
    }
    return all;
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto all = pieces();
    return pipelining::stages_of(all, {static_cast<int>(all.size())}).forwards[0]({ids})[0];
  }
  Reach reach;
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};

struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> parameters;
  at::Tensor drawn;
};

inline at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, kWords}), targets.reshape({-1}));
}

constexpr int kSteps = 3;

inline std::pair<at::Tensor, at::Tensor> batch_of(int step) {
  const auto words = torch::arange(10 * 5).mul(7 + step).add(step).remainder(kWords).view({10, 5});
  return {words.narrow(1, 0, 4), words.narrow(1, 1, 4)};
}

inline Trained on_one_device(int layers, int microbatches, at::ScalarType dtype, Reach reach = Reach::none) {
  torch::manual_seed(1);
  Model model(layers, reach);
  model.to(dtype);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = batch_of(step);
    const auto x = ids.tensor_split(microbatches), y = targets.tensor_split(microbatches);
    for (int i = 0; i < microbatches; ++i) {
      const auto loss = loss_of(model.forward(x[i]), y[i]) / microbatches;
      loss.backward();
      result.losses.push_back(loss.item<double>());
    }
    result.norms.push_back(clip_grad_norm_(model.parameters(), 0.5));
    optimizer.step();
  }
  for (const auto& item : model.named_parameters()) result.parameters[item.key()] = item.value().detach();
  result.drawn = torch::rand({3});
  return result;
}

// `where`: a mesh, or a list of them. `lay_out` places parameters before they have values.
template <class Where>
Trained on_a_pipeline(const Where& where, int layers, at::ScalarType dtype, const PipelineOptions& options, Reach reach = Reach::none,
                      const std::function<void(Model&, const DeviceMesh&)>& lay_out = {}) {
  const auto own = stage_mesh(where);
  torch::manual_seed(1);
  std::shared_ptr<Model> model;
  {
    const DeferredInit deferred(own);
    model = std::make_shared<Model>(layers, reach);
    model->to(dtype);
  }
  if (lay_out) lay_out(*model, own);
  auto pipe = pipeline(*model, where, model->pieces(), options);
  pipe.materialize();
  torch::optim::AdamW optimizer(pipe.parameters(), torch::optim::AdamWOptions(1e-2));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = batch_of(step);
    const c10::Device device(own.device_type());
    const auto done = pipe.step(ids.to(device), targets.to(device),
                                [&](const at::Tensor& y, const at::Tensor& t) { return loss_of(y, t) / pipe.microbatches(); });
    result.losses.insert(result.losses.end(), done.losses.begin(), done.losses.end());
    result.norms.push_back(pipe.clip_grad_norm_(0.5));
    optimizer.step();
  }
  for (const auto& [name, parameter] : pipe.named_parameters()) result.parameters[name] = full_tensor(parameter.detach()).cpu();
  result.drawn = torch::rand({3});
  return result;
}

inline void check_equal(const Trained& got, const Trained& expected) {
  require(got.losses == expected.losses, "test", "losses differ: {} and {}", fmt::join(got.losses, " "), fmt::join(expected.losses, " "));
  require(got.norms == expected.norms, "test", "norms differ: {} and {}", fmt::join(got.norms, " "), fmt::join(expected.norms, " "));
  require(!got.parameters.empty(), "test", "the rank has no parameters");
  for (const auto& [name, parameter] : got.parameters) require(parameter.equal(expected.parameters.at(name)), "test", "'{}' differs", name);
  require(got.drawn.equal(expected.drawn), "test", "what is drawn afterwards differs");
}

// In float64, where something is added in another order.
inline void check_close(const Trained& got, const Trained& expected) {
  const auto close = [](double a, double b) { return std::abs(a - b) <= 1e-10 * std::abs(b); };
  require(std::ranges::equal(got.losses, expected.losses, close), "test", "losses {}, expected {}", fmt::join(got.losses, " "),
          fmt::join(expected.losses, " "));
  require(std::ranges::equal(got.norms, expected.norms, close), "test", "norms {}, expected {}", fmt::join(got.norms, " "),
          fmt::join(expected.norms, " "));
  for (const auto& [name, parameter] : got.parameters)
    require(parameter.allclose(expected.parameters.at(name), 1e-9, 1e-9), "test", "'{}' differs", name);
  require(got.drawn.equal(expected.drawn), "test", "what is drawn afterwards differs");
}

}  // namespace dtensor::test::pipelined
