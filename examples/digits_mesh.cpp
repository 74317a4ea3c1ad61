// Trains a convolutional network on handwritten digits, data parallel over all ranks. digits_one_device.cpp is the same on one device.
#include "digits_cnn.hpp"

#include <dtensor/checkpoint/torch_files.hpp>
#include <dtensor/data/batches.hpp>
#include <dtensor/dtensor.hpp>
#include <fmt/format.h>
#include <torch/torch.h>

#include <string_view>

namespace dt = dtensor;

int main(int argc, char** argv) {
  const auto dtype = argc > 1 && std::string_view(argv[1]) == "--double" ? torch::kDouble : torch::kFloat;
  at::set_num_threads(1);
  return dt::launch(argc, argv, [&](dt::World& world) {
  const auto mesh = dt::init_device_mesh(torch::kCPU, {world.size()}, {"dp"});
  dt::Spmd spmd(mesh);
  torch::manual_seed(0);
  DigitsDataset train(true, 1), test(false, 1);
  const auto options = torch::data::DataLoaderOptions().batch_size(64).workers(2);
  auto train_loader = torch::data::make_data_loader(train.map(torch::data::transforms::Stack<>()), options);
  auto test_loader =
      torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(test.map(torch::data::transforms::Stack<>()), options);
  DigitsCnn model;
  model->to(dtype);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(2e-3));
  for (int epoch = 0, step = 0; epoch < 4; ++epoch) {
    model->train();
    train.set_epoch(epoch);
    for (auto& batch : dt::batches(*train_loader, mesh, {dt::shard(0)})) {
      auto loss = torch::cross_entropy_loss(model->forward(batch.data.to(dtype)), batch.target);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      const double value = loss.item<double>();
      if (world.rank() == 0) fmt::print("step {} loss {:.17g}\n", step, value);
      ++step;
    }
    torch::NoGradGuard no_grad;
    model->eval();
    int64_t right = 0;
    for (auto& batch : dt::batches(*test_loader, mesh, {dt::shard(0)})) {
      right += model->forward(batch.data.to(dtype)).argmax(1).eq(batch.target).sum().item<int64_t>();
    }
    if (world.rank() == 0) fmt::print("epoch {} right {} of {}\n", epoch, right, *test.size());
  }
  dt::save(model, "digits.pt");
  });
}
