// A small convolutional network with batch norm, trained under cuts of samples, channels and rows, against one device.
#include "catch.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

namespace dt = dtensor;

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using namespace torch::nn;
    conv1 = register_module("conv1", Conv2d(Conv2dOptions(1, 6, 5).padding(2)));
    norm1 = register_module("norm1", BatchNorm2d(6));
    conv2 = register_module("conv2", Conv2d(Conv2dOptions(6, 8, 3).stride(2).padding(1)));
    norm2 = register_module("norm2", BatchNorm2d(8));
    up = register_module("up", ConvTranspose2d(ConvTranspose2dOptions(8, 4, 2).stride(2)));
    head = register_module("head", Linear(4 * 4 * 4, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(norm1(conv1(x))), 3, 2, 1);
    x = torch::avg_pool2d(torch::relu(norm2(conv2(x))), 2);
    x = torch::relu(up(x));
    return head(x.flatten(1));
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::ConvTranspose2d up{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

struct Result {
  std::vector<double> losses;
  std::vector<torch::Tensor> state;  // parameters and running statistics
};

template <class PlaceModule, class PlaceBatch>
Result train(PlaceModule place_module, PlaceBatch place_batch) {
  torch::manual_seed(0);
  Net net;
  net->to(torch::kDouble);
  place_module(*net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Result result;
  for (int step = 0; step < 5; ++step) {
    const auto x = torch::arange(6 * 16 * 16, torch::kDouble).mul(0.37 + step).sin().reshape({6, 1, 16, 16});
    const auto y = torch::arange(6, torch::kLong).add(step).remainder(10);
    auto loss = torch::nn::functional::cross_entropy(net(place_batch(x)), place_batch(y));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    result.losses.push_back(loss.template item<double>());
  }
  net->eval();
  torch::NoGradGuard guard;
  result.losses.push_back(net(place_batch(torch::ones({6, 1, 16, 16}, torch::kDouble))).sum().template item<double>());
  for (const auto& p : net->parameters()) result.state.push_back(dt::full_tensor(p.detach()));
  for (const auto& b : net->buffers()) result.state.push_back(dt::full_tensor(b.detach()));
  return result;
}

void same(const char* name, std::vector<int64_t> sizes, std::vector<std::string> names, const dt::Placements& images,
          const dt::Plan& plan) {
  INFO(name);
  const auto expected = train([](torch::nn::Module&) {}, [](const torch::Tensor& t) { return t; });
  dt::LaunchOptions launch;
  launch.ranks = static_cast<int>(c10::multiply_integers(sizes));
  launch.deadline = std::chrono::seconds(60);
  CHECK_NOTHROW(dt::launch(launch, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, sizes, names);
    dt::Spmd spmd(mesh);
    const auto result = train([&](torch::nn::Module& module) { if (!plan.empty()) dt::parallelize_module(module, mesh, plan); },
                              [&](const torch::Tensor& t) {
                                auto placements = images;
                                for (auto& p : placements) p = p.is_shard() && p.dim >= t.dim() ? dt::replicate() : p;
                                return dt::distribute_tensor(t, mesh, placements).tensor();
                              });
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      dt::require(std::abs(result.losses[i] - expected.losses[i]) < 1e-10, "test", "{}: step {}: {} on the mesh, {} on one device", name, i,
                  result.losses[i], expected.losses[i]);
    }
    for (size_t i = 0; i < expected.state.size(); ++i) {
      dt::require(result.state[i].allclose(expected.state[i], 1e-10, 1e-10), "test", "{}: parameter {} differs", name, i);
    }
  }));
}

}  // namespace

TEST_CASE("model: a convolutional network is the same on every mesh", "[model][convolution]") {
  const auto rows = dt::shard(2), columns = dt::shard(3), samples = dt::shard(0), whole = dt::replicate();
  const dt::Plan channels{{"conv1.*", {{"c", dt::shard(0)}}},       {"norm1.weight", {{"c", dt::shard(0)}}},
                          {"norm1.bias", {{"c", dt::shard(0)}}},    {"norm1.running_*", {{"c", dt::shard(0)}}},
                          {"conv2.weight", {{"c", dt::shard(1)}}},  {"norm2.weight", {{"c", dt::shard(0)}}},
                          {"norm2.bias", {{"c", dt::shard(0)}}},    {"up.weight", {{"c", dt::shard(0)}}}};
  same("whole", {2}, {"x"}, {whole}, {});
  same("samples", {2}, {"n"}, {samples}, {});
  same("uneven samples", {4}, {"n"}, {samples}, {});
  same("rows", {2}, {"h"}, {rows}, {});
  same("uneven rows", {3}, {"h"}, {rows}, {});
  same("columns", {2}, {"w"}, {columns}, {});
  same("channels", {2}, {"c"}, {whole}, channels);
  same("uneven channels", {4}, {"c"}, {whole}, channels);
  same("samples and rows", {2, 2}, {"n", "h"}, {samples, rows}, {});
  same("rows and columns", {2, 2}, {"h", "w"}, {rows, columns}, {});
  same("samples and channels", {2, 2}, {"n", "c"}, {samples, whole}, channels);
}
