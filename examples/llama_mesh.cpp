// Trains a small Llama on text: fully sharded over dp, tensor and sequence parallel over tp. llama_one_device.cpp does it on one device.
#include "text_data.hpp"
#include "zoo/llama3.hpp"

#include <ATen/Parallel.h>
#include <dtensor/dtensor.hpp>
#include <fmt/format.h>
#include <torch/optim/adamw.h>

namespace dt = dtensor;

int main(int argc, char** argv) {
  at::set_num_threads(1);
  return dt::launch(argc, argv, [](dt::World& world) {
  const auto mesh = dt::init_device_mesh(torch::kCPU, {world.size() / 2, 2}, {"dp", "tp"});
  dt::Spmd spmd(mesh);
  const TextData text("");
  torch::manual_seed(0);
  zoo::Llama3 model(zoo::Llama3Options{256, 2, 64, 4, 2, 192});
  dt::parallelize_module(*model, mesh, dt::automatic_plan(*model));
  dt::fully_shard(*model, mesh["dp"]);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  for (int step = 0; step < 20; ++step) {
    auto [input, target] = text.batch(0, step, 8, 32);
    for (auto* tokens : {&input, &target}) *tokens = dt::distribute_tensor(*tokens, mesh, {dt::shard(0), dt::shard(1)});
    auto loss = zoo::loss(model->forward(input), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    const double value = loss.item<double>();
    if (world.rank() == 0) fmt::print("step {} loss {:.6f}\n", step, value);
  }
  });
}
