// Adam with averages of 8 bits: against its authors' map, plain Adam, and on meshes as on one device.
#include "tests/support/optimizer_support.hpp"

#include <dtensor/optim/adam8bit.hpp>

namespace dt = dtensor;
namespace optim = dtensor::optim;
using namespace dt::test;
using namespace dt::test::optimizers;

TEST_CASE("optim: the dynamic map is that of its authors", "[optim]") {
  // bitsandbytes.functional.create_dynamic_map(True) and (False): ends, and sums in double.
  for (const bool is_signed : {true, false}) {
    const auto map = optim::dynamic_map(is_signed);
    REQUIRE(map.numel() == 256);
    REQUIRE(std::get<0>(map.sort()).equal(map));
    REQUIRE(map.eq(0).sum().item<int64_t>() == 1);
    REQUIRE(map[255].item<float>() == 1);
  }
  const auto map = optim::dynamic_map(true);
  REQUIRE(map[127].item<float>() == 0);
  REQUIRE(map.narrow(0, 0, 127).neg().flip(0).equal(map.narrow(0, 128, 127)));
  REQUIRE(std::abs(map[254].item<double>() - 0.99296875) < 1e-7);    // the last of 64 parts of 0.1 to 1
  REQUIRE(std::abs(map[128].item<double>() - 0.55e-6) < 1e-12);      // the one part of the smallest exponent
  REQUIRE(std::abs(optim::dynamic_map(false)[1].item<double>() - 0.325e-6) < 1e-12);  // the first of two
}

TEST_CASE("optim: Adam8bit is Adam with averages that are coded", "[optim]") {
  const double lr = 0.01, b1 = 0.9, b2 = 0.99, eps = 1e-8, decay = 0.1;
  const int64_t block = 100;
  // Of every block, the nearest of 256 numbers, by looking at all.
  const auto coded = [&](const at::Tensor& whole, bool is_signed) {
    auto result = whole.clone().contiguous();
    const auto map = optim::dynamic_map(is_signed);
    auto* x = result.data_ptr<float>();
    const auto* numbers = map.data_ptr<float>();
    for (int64_t begin = 0; begin < result.numel(); begin += block) {
      const auto end = std::min(begin + block, result.numel());
      float most = 0;
      for (auto i = begin; i < end; ++i) most = std::max(most, std::abs(x[i]));
      for (auto i = begin; i < end && most > 0; ++i) {
        const auto nearest = std::min_element(numbers, numbers + 256,
                                              [&](float a, float b) { return std::abs(a - x[i] / most) < std::abs(b - x[i] / most); });
        x[i] = *nearest * most;
      }
    }
    return result;
  };
  const auto expected = reference(kLarge, [&](at::Tensor& x, const at::Tensor& g, Tensors& state, int t) {
    state[0] = b1 * state[0] + (1 - b1) * g;
    const auto root = adam_root(state[1], g, b2, eps, t);
    x = x * (1 - lr * decay) - lr * (state[0] / (1 - std::pow(b1, t)) / root);
    if (x.numel() < 50) return;
    state[0] = coded(state[0], true);
    state[1] = coded(state[1], false);
  });
  const auto options = optim::Adam8bitOptions(lr).betas({b1, b2}).eps(eps).weight_decay(decay).block_size(block).min_size(50);
  // A number halfway between two codes may go either way, and moves a step by a part of lr.
  const auto got = train(kLarge, maker<optim::Adam8bit>(options));
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto apart = (got[i] - expected[i]).abs();
    REQUIRE(apart.max().item<double>() < lr);
    REQUIRE(apart.gt(1e-5).sum().item<int64_t>() <= got[i].numel() / 500);
  }
  // And near Adam of 32 bits.
  const auto adam = train(kLarge, [&](Tensors given) {
    return std::make_unique<torch::optim::AdamW>(std::move(given),
                                                 torch::optim::AdamWOptions(lr).betas({b1, b2}).eps(eps).weight_decay(decay));
  });
  for (size_t i = 0; i < adam.size(); ++i) REQUIRE((got[i] - adam[i]).abs().mean().item<double>() < 0.1 * lr);
  REQUIRE_NOTHROW(same({got[2]}, {adam[2]}, 1e-6, "a small parameter"));
}

TEST_CASE("optim: Adam8bit on meshes has the bits of one device", "[optim]") {
  check_on_meshes(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01)), 0);
  check_on_meshes(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01).block_size(7).min_size(0).weight_decay(0.1)), 0);
  check_saved(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01)), 0);
  check_saved(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01).block_size(100)), 0);
}

TEST_CASE("optim: Adam8bit keeps 8 bits and communicates only where ranks share blocks", "[optim]") {
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World& world) {
    const auto mesh = line(world);
    const auto look = [&](const dt::Placement& placement, int64_t collectives, int64_t blocks) {
      const Problem problem = {{{64, 96}}, torch::kFloat};
      const Layouts layouts = {{placement}};
      const auto given = parameters(problem, mesh, layouts);
      optim::Adam8bit optimizer(given, optim::Adam8bitOptions(0.01));
      dt::CommDebugMode comm;
      steps(problem, optimizer, given, mesh, layouts, 0, 1);
      expect(comm, collectives, placement.str().c_str());
      const auto* state = optimizer.state_of(given[0]);
      const auto& codes = state->tensors.at("exp_avg");
      dt::require(codes.scalar_type() == torch::kByte && dt::DTensor(codes).placements()[0] == placement, "test", "the state lies as {}",
                  dt::DTensor(codes).layout().str());
      const auto here = state->tensors.at("exp_avg_max").numel();
      dt::require(here == blocks, "test", "{} blocks are here; expected {}", here, blocks);
    };
    look(dt::shard(0), 0, 6);         // 16 rows of 96: 6 blocks of 256
    look(dt::replicate(), 0, 24);
    look(dt::shard(1), 1, 24);
    look(dt::ragged_shard(0, {1, 2, 3, 4}), 1, 24);
  }));
}
