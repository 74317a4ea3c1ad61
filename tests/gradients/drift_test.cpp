// Ranks that train apart are told so: other data, another learning rate.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/words_of.hpp"

#include <dtensor/tensor/spmd.hpp>

#include <torch/torch.h>

namespace dt = dtensor;
using namespace dt::test;

namespace {

// A model and its optimizer inside Spmd; the data as a DataLoader's get() makes it there, filled by pointer.
struct Training {
  explicit Training(double rate) : optimizer(model->parameters(), torch::optim::SGDOptions(rate)) {}

  static at::Tensor filled(float first) {
    auto batch = torch::empty({8, 4});
    for (int i = 0; i < 32; ++i) batch.data_ptr<float>()[i] = first + static_cast<float>(i % 7);
    return batch;
  }

  void step(const at::Tensor& batch) {
    optimizer.zero_grad();
    model->forward(batch).square().mean().backward();
    optimizer.step();
  }

  torch::nn::Linear model{4, 3};
  torch::optim::SGD optimizer;
};

}  // namespace

TEST_CASE("drift: ranks that train on data of their own are told so", "[gradients]") {
  for (const auto* transport : {"threads", "gloo"}) {
    on_ranks(3, [](dt::World& world) {
      dt::Spmd spmd(dt::init_device_mesh(torch::kCPU, {3}, {"dp"}));
      torch::manual_seed(1);
      Training training(0.01);
      for (int i = 0; i < 20; ++i) training.step(Training::filled(static_cast<float>(i)));  // all ranks alike
      const auto text = words_of<dt::Error>([&] {
        for (int i = 0; i < 40; ++i) training.step(Training::filled(world.rank() == 1 ? 5.F : 0.F));
      });
      for (const auto* part : {"the gradient of a parameter of sizes [3", "replicated, but its values on ranks 1 differ", "from_local"}) {
        dt::require(text.find(part) != std::string::npos, "test", "no '{}' in '{}'", part, text);
      }
    }, transport);
  }
}

TEST_CASE("drift: ranks whose learning rates differ are told so", "[gradients]") {
  for (const auto* transport : {"threads", "gloo"}) {
    on_ranks(4, [](dt::World& world) {
      const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
      dt::Spmd spmd(mesh);
      torch::manual_seed(1);
      Training training(world.rank() < 2 ? 0.01 : 0.02);
      const auto batch = dt::distribute_tensor(Training::filled(0), mesh, {dt::shard(0), dt::replicate()});
      training.step(batch);
      const auto text = words_of<dt::Error>([&] { training.step(batch); });
      dt::require(text.find(world.rank() % 2 ? "ranks 3 differ" : "ranks 2 differ") != std::string::npos, "test", "got '{}'", text);
      dt::require(text.find("learning rate") != std::string::npos, "test", "got '{}'", text);
    }, transport);
  }
}

TEST_CASE("drift: nothing is compared where the check is off", "[gradients]") {
  on_ranks(2, [](dt::World& world) {
    dt::Spmd spmd(dt::init_device_mesh(torch::kCPU, {2}, {"dp"}));
    dt::set_replication_check(false);
    Training training(0.01);
    for (int i = 0; i < 20; ++i) training.step(Training::filled(static_cast<float>(world.rank())));
    dt::set_replication_check(true);
  });
}
