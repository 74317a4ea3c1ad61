// A small model trained with its parameters laid out in some way, against the same on one device.
#pragma once

#include "tests/support/op_check.hpp"

#include <cmath>
#include <functional>
#include <vector>

namespace dtensor::test {

// The losses of four steps.
inline std::vector<double> losses_of_small_model(const std::function<void(torch::nn::Module&)>& lay_out) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(12, 16), torch::nn::GELU(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                              torch::nn::Linear(16, 4));
  lay_out(*model);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.05));
  std::vector<double> losses;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto loss = model->forward(fractions({10, 12}, step)).square().mean();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// Four ranks have the losses of one device.
inline void check_small_model_trains(const std::function<void(torch::nn::Module&, const DeviceMesh&)>& lay_out) {
  const auto expected = losses_of_small_model([](torch::nn::Module&) {});
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh(
        {4},
        [&](const DeviceMesh& mesh) {
          Spmd spmd(mesh);
          const auto losses = losses_of_small_model([&](torch::nn::Module& model) { lay_out(model, mesh); });
          for (size_t i = 0; i < losses.size(); ++i) {
            require(std::abs(losses[i] - expected[i]) < 1e-5, "test", "step {}: loss {} is not {}", i, losses[i], expected[i]);
          }
        },
        transport));
  }
}

}  // namespace dtensor::test
