// The training kit on a small model: activation checkpointing, loss scaling, clipping, two optimizers, a learning-rate schedule. Trains on
// a mesh of all ranks and on one device, and compares.
//
//   ./training_kit --ranks 4
#include <range/v3/view/zip.hpp>
#include <torch/torch.h>

#include <dtensor/dtensor.hpp>
#include <dtensor/optim/lamb.hpp>
#include <dtensor/optim/muon.hpp>

#include <cmath>
#include <iostream>
#include <optional>

namespace dt = dtensor;

namespace {

struct Block : torch::nn::Module {
  explicit Block(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::dropout(down(torch::gelu(up(norm(x)))), 0.1, is_training()); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>(32)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : blocks) {
      // What a block saves for backward is dropped and computed again, all but the results of matrix products.
      x = dt::checkpoint({.save = dt::matrix_products()}, [block](const torch::Tensor& in) { return block->forward(in); }, x);
    }
    return x;
  }
  std::vector<std::shared_ptr<Block>> blocks;
};

// The losses of 30 steps.
std::vector<double> train(const std::optional<dt::DeviceMesh>& mesh) {
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);
  torch::manual_seed(0);
  Model model;
  if (mesh) dt::parallelize_module(model, *mesh, dt::tensor_parallel({{"*.up", dt::ColwiseParallel()}, {"*.down", dt::RowwiseParallel()}}));
  auto x = torch::randn({24, 32}), y = torch::randn({24, 32});
  if (mesh) x = dt::distribute_tensor(x, *mesh, {dt::shard(0), dt::replicate()});
  if (mesh) y = dt::distribute_tensor(y, *mesh, {dt::shard(0), dt::replicate()});

  std::vector<torch::Tensor> matrices, others;
  for (const auto& p : model.parameters()) (p.dim() == 2 ? matrices : others).push_back(p);
  dt::optim::Muon muon(matrices, dt::optim::MuonOptions(0.02));
  dt::optim::Lamb lamb(others, dt::optim::LambOptions(0.01));
  const auto schedule = dt::lr::warmup_stable_decay(3, 17, 10, 0.1);
  dt::lr::Scheduler of_muon(muon, schedule), of_lamb(lamb, schedule);
  dt::GradScaler scaler({.init_scale = 1024});

  std::vector<double> losses;
  for (int step = 0; step < 30; ++step) {
    const auto loss = torch::mse_loss(model.forward(x), y);
    muon.zero_grad();
    lamb.zero_grad();
    scaler.scale(loss).backward();
    scaler.unscale_(muon);
    scaler.unscale_(lamb);
    dt::clip_grad_norm_(model.parameters(), 1.0);
    scaler.step(muon);
    scaler.step(lamb);
    scaler.update();
    of_muon.step();
    of_lamb.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<double> on_mesh;
  const int status = dt::launch(argc, argv, [&](dt::World& world) {
    const int64_t dp = world.size() % 2 ? 1 : 2;
    const auto losses = train(dt::init_device_mesh(torch::kCPU, {dp, world.size() / dp}, {"dp", "tp"}));
    if (world.rank() == 0) on_mesh = losses;
  });
  if (status != 0 || on_mesh.empty()) return status;
  const auto alone = train(std::nullopt);
  double apart = 0;
  for (const auto& [loss, wanted] : ranges::views::zip(on_mesh, alone)) apart = std::max(apart, std::abs(loss - wanted) / wanted);
  std::cout << "loss " << on_mesh.front() << " -> " << on_mesh.back() << "; apart from one device by " << apart << " at most, relatively\n";
  return apart < 1e-4 && on_mesh.back() < on_mesh.front() ? 0 : 1;
}
