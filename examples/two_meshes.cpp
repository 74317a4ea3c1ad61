// An encoder on two ranks and a decoder on the others, in one program that every rank runs, trained beside one device.
//
//   ./two_meshes --ranks 5
#include <range/v3/numeric/iota.hpp>
#include <range/v3/view/zip.hpp>
#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <cmath>
#include <iostream>

namespace dt = dtensor;

namespace {

constexpr int kSteps = 20;

struct Encoder : torch::nn::Module {
  Encoder() : up(register_module("up", torch::nn::Linear(16, 64))), down(register_module("down", torch::nn::Linear(64, 16))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::dropout(down(torch::gelu(up(x))), 0.1, is_training()); }
  torch::nn::Linear up, down;
};

torch::Tensor batch(int step) { return torch::sin(torch::arange(24 * 16, torch::kDouble).view({24, 16}) * (0.01 * (step + 1))); }

std::vector<double> train_on_one_device() {
  torch::manual_seed(0);
  const auto encoder = std::make_shared<Encoder>();
  torch::nn::Linear decoder(16, 4);
  encoder->to(torch::kDouble), decoder->to(torch::kDouble);
  torch::optim::AdamW of_encoder(encoder->parameters(), 1e-2), of_decoder(decoder->parameters(), 1e-2);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto loss = decoder(encoder->forward(batch(step))).square().mean();
    of_encoder.zero_grad(), of_decoder.zero_grad();
    loss.backward();
    of_encoder.step(), of_decoder.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// Tensor parallel on the first two ranks, data parallel on the others.
std::vector<double> train_on_two_meshes(dt::World& world) {
  const int rest = std::max(world.size() - 2, 1);
  std::vector<int> ranks(rest);
  ranges::iota(ranks, world.size() - rest);
  const auto pair = world.size() > 1 ? std::vector<int>{0, 1} : std::vector<int>{0};
  const dt::DeviceMesh first(torch::kCPU, pair, {static_cast<int64_t>(pair.size())}, {"tp"}), second(torch::kCPU, ranks, {rest}, {"dp"});

  torch::manual_seed(0);
  const auto encoder = dt::on(first, [] { return std::make_shared<Encoder>(); });
  auto decoder = dt::on(second, [] { return torch::nn::Linear(16, 4); });
  dt::on(first, [&] {
    encoder->to(torch::kDouble);
    dt::parallelize_module(*encoder, first, dt::tensor_parallel({{"up", dt::ColwiseParallel()}, {"down", dt::RowwiseParallel()}}));
  });
  dt::on(second, [&] { decoder->to(torch::kDouble); });
  torch::optim::AdamW of_encoder(encoder->parameters(), 1e-2), of_decoder(decoder->parameters(), 1e-2);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = dt::distribute_tensor(batch(step), first, {dt::replicate()});
    const torch::Tensor hidden = dt::on(first, [&] { return encoder->forward(x); });
    const auto moved = dt::redistribute(hidden, second, {dt::shard(0)});
    const torch::Tensor loss = dt::on(second, [&] { return decoder(moved).square().mean(); });
    dt::on(first, [&] { of_encoder.zero_grad(); });
    dt::on(second, [&] { of_decoder.zero_grad(); });
    loss.backward();  // on every rank: the gradient moves back
    dt::on(first, [&] { of_encoder.step(); });
    dt::on(second, [&] { of_decoder.step(); });
    if (second.contains_this_rank()) losses.push_back(dt::full_tensor(loss).item<double>());
  }
  return losses;
}

}  // namespace

int main(int argc, char** argv) {
  return dt::launch(argc, argv, [](dt::World& world) {
    const auto losses = train_on_two_meshes(world);
    if (world.rank() != world.size() - 1) return;
    const auto expected = train_on_one_device();
    double apart = 0;
    for (const auto& [loss, wanted] : ranges::views::zip(losses, expected)) apart = std::max(apart, std::abs(loss / wanted - 1));
    std::cout << "losses " << losses.front() << " to " << losses.back() << ", apart from one device by " << apart << '\n';
    if (!(apart < 1e-9)) throw std::runtime_error("the losses are not those of one device");
  });
}
