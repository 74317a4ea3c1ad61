// Learning rates: the schedules against their formulas, and what sets them.
#include "tests/support/core_support.hpp"

#include <dtensor/training/lr.hpp>

#include <torch/torch.h>

#include <cmath>
#include <numbers>
#include <sstream>

namespace lr = dtensor::lr;
using dtensor::test::says;

namespace {

bool is_close(double got, double expected) { return std::abs(got - expected) <= 1e-12 * std::max(1.0, std::abs(expected)); }

void check(const lr::Schedule& schedule, const std::vector<std::pair<int64_t, double>>& expected) {
  for (const auto& [step, factor] : expected) {
    INFO("step " << step << ": " << schedule(step) << " for " << factor);
    REQUIRE(is_close(schedule(step), factor));
  }
}

}  // namespace

TEST_CASE("lr: schedules have the values of their formulas", "[lr]") {
  check(lr::constant(0.5), {{0, 0.5}, {1000, 0.5}});
  check(lr::linear(1, 0.2, 4), {{0, 1}, {1, 0.8}, {2, 0.6}, {4, 0.2}, {9, 0.2}});
  check(lr::linear(1, 0.2, 0), {{0, 0.2}});
  check(lr::warmup(4), {{0, 0.25}, {1, 0.5}, {3, 1}, {4, 1}, {100, 1}});
  check(lr::warmup(0), {{0, 1}});
  check(lr::cosine(8, 0.1), {{0, 1}, {4, 0.55}, {2, 0.55 + 0.45 * std::sqrt(0.5)}, {8, 0.1}, {20, 0.1}});
  check(lr::polynomial(4, 2, 0.2), {{0, 1}, {2, 0.4}, {4, 0.2}, {5, 0.2}});
  check(lr::inverse_sqrt(4), {{0, 0.25}, {3, 1}, {15, 0.5}, {63, 0.25}});
  check(lr::warmup_stable_decay(2, 3, 4, 0.2), {{0, 0.5}, {1, 1}, {4, 1}, {5, 1}, {6, 0.8}, {9, 0.2}, {30, 0.2}});
  check(lr::warmup_stable_decay(0, 1, 4, 0, lr::Decay::one_minus_sqrt), {{0, 1}, {1, 1}, {2, 0.5}, {5, 0}});
  check(lr::warmup_stable_decay(0, 1, 4, 0, lr::Decay::cosine), {{1, 1}, {3, 0.5}, {5, 0}});
  check(lr::sequence({{lr::linear(0, 1, 2), 2}, {lr::constant(3), 1}, {lr::cosine(2), 0}}),
        {{0, 0}, {1, 0.5}, {2, 3}, {3, 1}, {4, 0.5}, {5, 0}, {9, 0}});
  check(lr::product(lr::warmup(2), lr::constant(0.5)), {{0, 0.25}, {1, 0.5}});
}

// torch.optim.lr_scheduler.OneCycleLR(total_steps=10, max_lr=1), of PyTorch 2.6.
TEST_CASE("lr: one cycle is that of PyTorch", "[lr]") {
  const double first = 0.04, last = 0.04 / 1e4;
  const auto cosine = [](double from, double to, double t) { return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * t)); };
  check(lr::one_cycle(10), {{0, first}, {1, (first + 1) / 2}, {2, 1}, {3, cosine(1, last, 1 / 7.0)}, {9, last}, {12, last}});
}

TEST_CASE("lr: a scheduler sets the rates of all groups", "[lr]") {
  torch::nn::Linear a(2, 2), b(2, 2);
  torch::optim::SGD optimizer({torch::optim::OptimizerParamGroup(a->parameters(), std::make_unique<torch::optim::SGDOptions>(0.4)),
                               torch::optim::OptimizerParamGroup(b->parameters(), std::make_unique<torch::optim::SGDOptions>(0.1))},
                              torch::optim::SGDOptions(1));
  lr::Scheduler scheduler(optimizer, lr::warmup(4));
  REQUIRE(is_close(scheduler.rates()[0], 0.1));
  REQUIRE(is_close(scheduler.rates()[1], 0.025));
  scheduler.step();
  REQUIRE(is_close(optimizer.param_groups()[0].options().get_lr(), 0.2));
  for (int i = 0; i < 5; ++i) scheduler.step();
  REQUIRE(is_close(scheduler.rates()[0], 0.4));

  scheduler.set_step(2);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  scheduler.save(out);
  out.save_to(file);
  torch::optim::Adam other(b->parameters(), 7);
  torch::serialize::InputArchive in, same;
  in.load_from(file);
  lr::Scheduler wrong(other, lr::warmup(4));
  REQUIRE_THROWS_WITH(wrong.load(in), says("had 2 groups; expected 1"));
  optimizer.param_groups()[0].options().set_lr(9);
  lr::Scheduler resumed(optimizer, {lr::warmup(4), lr::constant(2)});
  resumed.load(in);
  REQUIRE(resumed.current_step() == 2);
  REQUIRE(is_close(resumed.rates()[0], 0.3));
  REQUIRE(is_close(resumed.rates()[1], 0.2));
}

TEST_CASE("lr: bad arguments", "[lr]") {
  const double nan = std::nan("");
  REQUIRE_THROWS_WITH(lr::constant(-1), says("[lr] got factor -1"));
  REQUIRE_THROWS_WITH(lr::constant(nan), says("got factor nan"));
  REQUIRE_THROWS_WITH(lr::linear(1, 0, -1), says("got -1 steps"));
  REQUIRE_THROWS_WITH(lr::warmup(-2), says("got -2 steps"));
  REQUIRE_THROWS_WITH(lr::cosine(4, -0.1), says("got last -0.1"));
  REQUIRE_THROWS_WITH(lr::inverse_sqrt(0), says("expected at least 1"));
  REQUIRE_THROWS_WITH(lr::warmup_stable_decay(1, -1, 1), says("-1 stable steps"));
  REQUIRE_THROWS_WITH(lr::one_cycle(0), says("cycle of 0 steps"));
  REQUIRE_THROWS_WITH(lr::one_cycle(10, 2), says("rises for 2"));
  REQUIRE_THROWS_WITH(lr::one_cycle(10, 0.3, 0), says("div_factor 0"));
  REQUIRE_THROWS_WITH(lr::sequence({}), says("at least one"));
  REQUIRE_THROWS_WITH(lr::sequence({{nullptr, 2}}), says("is empty"));
  REQUIRE_THROWS_WITH(lr::product(lr::Schedule(), lr::constant()), says("is empty"));
  torch::optim::SGD optimizer({torch::zeros({2})}, torch::optim::SGDOptions(1));
  REQUIRE_THROWS_WITH(lr::Scheduler(optimizer, std::vector<lr::Schedule>{}), says("got 0 schedules; expected one for each of the 1"));
  REQUIRE_THROWS_WITH(lr::Scheduler(optimizer, lr::Schedule()), says("is empty"));
  lr::Scheduler scheduler(optimizer, lr::constant());
  REQUIRE_THROWS_WITH(scheduler.set_step(-1), says("got step -1"));
}
