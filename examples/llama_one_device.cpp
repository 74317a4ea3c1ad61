// Trains a small Llama on text, on one device. llama_mesh.cpp is the same program on a mesh.
#include "text_data.hpp"
#include "zoo/llama3.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>

int main() {
  at::set_num_threads(1);
  const TextData text("");
  torch::manual_seed(0);
  zoo::Llama3 model(zoo::Llama3Options{256, 2, 64, 4, 2, 192});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  for (int step = 0; step < 20; ++step) {
    auto [input, target] = text.batch(0, step, 8, 32);
    auto loss = zoo::loss(model->forward(input), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    const double value = loss.item<double>();
    fmt::print("step {} loss {:.6f}\n", step, value);
  }
}
