// A small model of experts that trains, on one device and on meshes.
#pragma once

#include "tests/support/core_support.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/moe.hpp>
#include <dtensor/training/checkpoint.hpp>
#include <dtensor/training/clip.hpp>

#include <torch/torch.h>

#include <cmath>
#include <optional>

namespace dtensor::test::experts {

constexpr int64_t kDim = 8, kBatch = 4, kLength = 6, kSteps = 5;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const nn::MoEOptions& options) {
    in = register_module("in", torch::nn::Linear(kDim, kDim));
    moe = register_module("moe", nn::MoE(options));
    out = register_module("out", torch::nn::Linear(kDim, kDim));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto h = torch::tanh(in(x));
    return out(h + (checkpointed ? checkpoint([this](const at::Tensor& y) { return moe(y); }, h) : moe(h)));
  }
  bool checkpointed = false;
  torch::nn::Linear in{nullptr}, out{nullptr};
  nn::MoE moe{nullptr};
};
TORCH_MODULE(Net);

inline nn::MoEOptions options_of(const std::function<void(nn::MoEOptions&)>& change = [](auto&) {}) {
  nn::MoEOptions options{.dim = kDim, .hidden = 6, .experts = 8, .router = {.dtype = torch::kDouble}};
  change(options);
  return options;
}

struct Result {
  std::vector<double> losses, norms;
  std::vector<at::Tensor> gradients, parameters;  // gradients of the first step
  at::Tensor bias, counts;                        // counts of the first step
};

using Place = std::function<at::Tensor(const at::Tensor&)>;

// Five steps of AdamW over two microbatches each.
inline Result train(const nn::MoEOptions& options, const std::function<void(Net&)>& lay_out, const Place& place,
                    bool checkpointed = false) {
  torch::manual_seed(3);
  Net net(options);
  net->to(torch::kDouble);
  net->checkpointed = checkpointed;
  lay_out(net);
  nn::set_loss_scale(*net, 0.5);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  Result result;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int half = 0; half < 2; ++half) {
      at::Tensor x, target;
      {
        const NoSpmd plain;
        torch::manual_seed(100 + 2 * step + half);
        x = torch::randn({kBatch, kLength, kDim}, torch::kDouble), target = torch::randn({kBatch, kLength, kDim}, torch::kDouble);
      }
      const auto loss = torch::mse_loss(net(place(x)), place(target)) / 2;
      loss.backward();
      sum += loss.item<double>();
    }
    result.losses.push_back(sum);
    if (step == 0) {
      for (const auto& p : net->parameters()) result.gradients.push_back(full_tensor(p.grad()).clone());
      result.counts = net->moe->counts();
    }
    result.norms.push_back(clip_grad_norm_(net->parameters(), 0.5));
    optimizer.step();
    nn::update_balance(*net);
  }
  for (const auto& p : net->parameters()) result.parameters.push_back(full_tensor(p.detach()).clone());
  if (net->moe->bias.defined()) result.bias = full_tensor(net->moe->bias);
  return result;
}

inline Result on_one_device(const nn::MoEOptions& options, bool checkpointed = false) {
  const NoSpmd plain;
  return train(options, [](Net&) {}, [](const at::Tensor& x) { return x; }, checkpointed);
}

inline void check(const Result& got, const Result& expected, const std::string& what, double tolerance = 1e-12) {
  const NoSpmd plain;
  for (int64_t i = 0; i < kSteps; ++i) {
    require(std::abs(got.losses[i] - expected.losses[i]) <= tolerance, "test", "{}: loss {} is {} and not {}", what, i, got.losses[i],
            expected.losses[i]);
    require(std::abs(got.norms[i] - expected.norms[i]) <= tolerance * expected.norms[i], "test", "{}: norm {} is {} and not {}", what, i,
            got.norms[i], expected.norms[i]);
  }
  const auto same = [&](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const char* kind) {
    for (size_t i = 0; i < b.size(); ++i) {
      const auto difference = (a[i] - b[i]).abs().max().item<double>();
      require(difference <= tolerance * std::max(1.0, b[i].abs().max().item<double>()), "test", "{}: {} {} differs by {}", what, kind, i,
              difference);
    }
  };
  same(got.gradients, expected.gradients, "gradient");
  same(got.parameters, expected.parameters, "parameter");
  require(got.counts.equal(expected.counts), "test", "{}: the counts differ", what);
  require(!expected.bias.defined() || got.bias.equal(expected.bias), "test", "{}: the biases differ", what);
}

struct Way {
  Placements batch;
  ExpertParallelOptions parallel;
  std::optional<std::string> fully = {};  // the mesh dimension over which all parameters are sharded
};

inline void check_on(const DeviceMesh& mesh, const nn::MoEOptions& options, const Way& way, const Result& expected, const std::string& what,
              bool checkpointed = false) {
  const Spmd spmd(mesh);
  const auto lay_out = [&](Net& net) {
    expert_parallel(*net, mesh, way.parallel);
    if (way.fully) fully_shard(*net, mesh[*way.fully]);
  };
  const auto place = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, way.batch).tensor(); };
  check(train(options, lay_out, place, checkpointed), expected, what);
}

}  // namespace dtensor::test::experts
