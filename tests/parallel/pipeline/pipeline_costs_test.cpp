// A pipeline whose stages are balanced by the time that its pieces take.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/pipeline.hpp>

#include <torch/torch.h>

#include <thread>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Layers of one size, of which the first takes a while.
struct Uneven : torch::nn::Module {
  Uneven() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module(fmt::format("l{}", i), torch::nn::Linear(3, 3)));
  }
  std::vector<Piece> pieces() {
    std::vector<Piece> all;
    for (size_t i = 0; i < layers.size(); ++i) {
      all.push_back(piece(fmt::format("l{}", i), [this, i](const at::Tensor& x) {
        std::this_thread::sleep_for(std::chrono::milliseconds(i == 0 ? 20 : 2));
        return layers[i](x);
      }));
    }
    return all;
  }
  std::vector<torch::nn::Linear> layers;
};

at::Tensor squares(const at::Tensor& y, const at::Tensor& target) { return (y - target).square().sum(); }

}  // namespace

TEST_CASE("pipeline costs: stages are balanced by measured times", "[pipeline]") {
  for (const char* transport : {"threads", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](World& world) {
          const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"pp", "dp"});
          const Spmd spmd(stage_mesh(mesh));
          Uneven model;
          auto by_size = pipeline(model, mesh, model.pieces(), {.microbatches = 2});
          require(by_size.cut() == std::vector{2, 2}, "test", "cut by size");
          by_size.step(torch::ones({4, 3}), torch::zeros({4, 3}), squares);
          const auto costs = by_size.measured_costs();
          require(costs.size() == 4 && costs[0] >= 20 && costs[3] >= 2, "test", "costs {}", fmt::join(costs, " "));
          const auto first = world.transport().connect("test", {0, 1, 2, 3})->broadcast(at::tensor(costs, at::kDouble), 0).get();
          require(first.equal(at::tensor(costs, at::kDouble)), "test", "rank 0 has other costs");
          const auto by_time = pipeline(model, mesh, model.pieces(), {.microbatches = 2, .costs = costs});
          require(by_time.cut() == std::vector{1, 3}, "test", "cut {}", fmt::join(by_time.cut(), " "));
        },
        transport));
  }
}

TEST_CASE("pipeline costs: nothing is known before a step", "[pipeline][errors]") {
  CHECK_THROWS_WITH(on_ranks(2,
                             [](World&) {
                               const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
                               const Spmd spmd(stage_mesh(mesh));
                               Uneven model;
                               pipeline(model, mesh, model.pieces(), {.microbatches = 2}).measured_costs();
                             }),
                    says("a piece has not run yet; hint: make a step"));
}
