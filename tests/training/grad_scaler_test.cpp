// Loss scaling: on a mesh as on one device, and what all ranks agree on.
#include "tests/support/dispatch_support.hpp"

#include <dtensor/training/clip.hpp>
#include <dtensor/training/grad_scaler.hpp>

#include <optional>
#include <sstream>

namespace dt = dtensor;
using namespace dt::test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

dt::GradScaler::Options small() { return {.init_scale = 8, .growth_factor = 2, .backoff_factor = 0.25, .growth_interval = 2}; }

// The scales and the weight of five iterations, of which the third has an infinite element in row `bad`.
std::vector<double> train(const std::optional<dt::DeviceMesh>& mesh, const dt::Placements& placements, int64_t bad, int64_t collectives) {
  auto weight = counting({6, 3});
  if (mesh) weight = dt::distribute_tensor(weight, *mesh, placements).tensor().detach();
  weight.requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.01));
  dt::GradScaler scaler(small());
  std::vector<double> seen;
  for (int i = 0; i < 5; ++i) {
    auto factor = torch::ones({6, 3}, torch::kDouble);
    if (i == 2) factor[bad][1] = kInfinity;
    if (mesh) factor = dt::distribute_tensor(factor, *mesh, placements).tensor();
    optimizer.zero_grad();
    scaler.scale((weight.pow(2) * factor).sum()).backward();
    std::optional<dt::CommDebugMode> comm(std::in_place);
    if (i % 2 == 1) scaler.unscale_(optimizer);
    const bool stepped = scaler.step(optimizer);
    dt::require(stepped == (i != 2), "test", "iteration {} {}", i, stepped ? "stepped" : "was left out");
    if (mesh) expect(*comm, collectives, "a step");
    comm.reset();
    scaler.update();
    seen.push_back(scaler.get_scale());
    const auto whole = dt::full_tensor(weight.detach());
    seen.push_back(whole.sum().item<double>());
  }
  return seen;
}

}  // namespace

TEST_CASE("scaler: scales and skips on meshes as on one device", "[scaler]") {
  for (const int64_t bad : {0, 5}) {
    const auto expected = train(std::nullopt, {}, bad, 0);
    REQUIRE(std::vector<double>{expected[0], expected[2], expected[4], expected[6], expected[8]} == std::vector<double>{8, 16, 4, 4, 8});
    REQUIRE(expected[3] == expected[5]);
    REQUIRE(expected[5] != expected[7]);
    for (const auto* transport : {"threads", "gloo"}) {
      for (const int n : {1, 2, 3, 4}) {
        REQUIRE_NOTHROW(on_ranks(n, [&](dt::World& world) {
          for (const auto& placement : {dt::shard(0), dt::shard(1), dt::replicate()}) {
            const auto got = train(line(world), {placement}, bad, n > 1);
            for (size_t i = 0; i < got.size(); ++i) {
              dt::require(std::abs(got[i] - expected[i]) <= 1e-12 * std::abs(expected[i]), "test", "value {}: {} for {}", i, got[i],
                          expected[i]);
            }
          }
        }, transport));
      }
    }
    REQUIRE_NOTHROW(on_ranks(4, [&](dt::World&) {
      const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
      dt::require(train(mesh, {dt::shard(0), dt::replicate()}, bad, 1)[4] == 4, "test", "the scale differs");
    }));
  }
}

TEST_CASE("scaler: with clipping and in half precision", "[scaler]") {
  auto weight = torch::ones({4}, torch::kHalf).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(1));
  dt::GradScaler scaler({.init_scale = 1024});
  weight.mutable_grad() = torch::full({4}, 1024.0, torch::kHalf);
  scaler.unscale_(optimizer);
  REQUIRE(std::abs(dt::clip_grad_norm_({weight}, 1) - 2) < 1e-6);
  REQUIRE(scaler.step(optimizer));
  REQUIRE(weight.eq(0.5).all().item<bool>());
  const auto scaled = scaler.scale(std::vector<at::Tensor>{torch::ones({1}), torch::full({1}, 2.0)});
  REQUIRE(scaled[1].item<double>() == 2048);
}

TEST_CASE("scaler: several optimizers shrink one scale", "[scaler]") {
  auto a = torch::ones({2}).requires_grad_(), b = torch::ones({2}).requires_grad_();
  torch::optim::SGD first({a}, torch::optim::SGDOptions(1)), second({b}, torch::optim::SGDOptions(1));
  dt::GradScaler scaler(small());
  a.mutable_grad() = torch::ones({2});
  b.mutable_grad() = torch::full({2}, std::nan(""));
  REQUIRE(scaler.step(first));
  REQUIRE_FALSE(scaler.step(second));
  scaler.update();
  REQUIRE(scaler.get_scale() == 2);
  REQUIRE(a[0].item<double>() == 1 - 1.0 / 8);
  REQUIRE(b[0].item<double>() == 1);
}

TEST_CASE("scaler: is saved and loaded", "[scaler]") {
  auto weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(1));
  dt::GradScaler scaler(small());
  weight.mutable_grad() = torch::ones({2});
  scaler.step(optimizer);
  scaler.update();
  scaler.update(32);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  scaler.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  dt::GradScaler other;
  other.load(in);
  REQUIRE(other.get_scale() == 32);
  REQUIRE(other.growth_tracker() == 1);
  REQUIRE(other.options().growth_interval == 2);
  REQUIRE(other.options().backoff_factor == 0.25);
  other.step(optimizer);
  other.update();
  REQUIRE(other.get_scale() == 64);
}

TEST_CASE("scaler: misuse and bad options", "[scaler]") {
  auto weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(1));
  dt::GradScaler scaler(small());
  REQUIRE_THROWS_WITH(scaler.update(), says("[GradScaler] update() without a gradient"));
  REQUIRE_THROWS_WITH(scaler.step(optimizer), says("no parameter of the optimizer has a gradient"));
  weight.mutable_grad() = torch::ones({2});
  scaler.unscale_(optimizer);
  REQUIRE_THROWS_WITH(scaler.unscale_(optimizer), says("has been unscaled already"));
  scaler.step(optimizer);
  REQUIRE_THROWS_WITH(scaler.step(optimizer), says("has stepped already"));
  REQUIRE_THROWS_WITH(scaler.unscale_(optimizer), says("has stepped already"));
  scaler.update();
  REQUIRE_THROWS_WITH(scaler.update(), says("without a gradient"));
  REQUIRE_THROWS_WITH(scaler.update(0), says("got a new scale of 0"));
  REQUIRE_THROWS_WITH(dt::GradScaler({.init_scale = 0}), says("init_scale 0"));
  REQUIRE_THROWS_WITH(dt::GradScaler({.growth_factor = 1}), says("growth_factor 1"));
  REQUIRE_THROWS_WITH(dt::GradScaler({.backoff_factor = 1}), says("backoff_factor 1"));
  REQUIRE_THROWS_WITH(dt::GradScaler({.growth_interval = 0}), says("growth_interval 0"));
  dt::GradScaler off({.enabled = false});
  REQUIRE(off.get_scale() == 1);
  REQUIRE(off.scale(weight).is_same(weight));
  REQUIRE(off.step(optimizer));
  off.update();
}
