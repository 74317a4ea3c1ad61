// Microbatches in ping-pong: the schedule, its formula against the simulator, and stages that sleep.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"
#include "tests/support/pipeline_support.hpp"
#include "tests/support/sanitizers.hpp"

#include <dtensor/collectives.hpp>
#include <dtensor/parallel/pipeline/ping_pong.hpp>
#include <dtensor/parallel/pipeline/runner.hpp>

#include <torch/torch.h>

#include <chrono>
#include <thread>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::pipelining;

namespace {

Costs ping_pong_costs(const Schedule& schedule, const PingPongTimes& forward, const PingPongTimes& backward) {
  Costs costs{.message = forward.message};
  for (int s = 0; s < schedule.stages(); ++s) {
    const bool first = schedule.rank_of_stage[s] == 0;
    costs.stages.push_back({first ? forward.first : forward.second, first ? backward.first : backward.second, 0});
  }
  return costs;
}

using NapClock = std::chrono::steady_clock;

// Sleeps, and watches the clock at the end: a sleeper is woken late.
void take_a_nap(double milliseconds) {
  const auto end = NapClock::now() + std::chrono::microseconds(static_cast<int64_t>(milliseconds * 1e3));
  std::this_thread::sleep_until(end - std::chrono::microseconds(200));
  while (NapClock::now() < end) {
  }
}

struct NapsInBackward : torch::autograd::Function<NapsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double milliseconds) {
    context->saved_data["milliseconds"] = milliseconds;
    return x.clone();
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context, std::vector<at::Tensor> gradients) {
    take_a_nap(context->saved_data["milliseconds"].toDouble());
    return {gradients[0], at::Tensor()};
  }
};

// The least milliseconds of a step that sleeps so, of several, since a busy machine can only make it longer; when it is as short as
// `enough`, that will do.
double milliseconds_of_step(int layers, int microbatches, const PingPongTimes& forward, const PingPongTimes& backward, double enough) {
  double best = std::numeric_limits<double>::infinity();
  on_ranks(2, [&](World& world) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"pp"});
    const auto own = mesh.slice("pp", world.rank());
    const auto schedule = ping_pong(layers, microbatches);
    std::vector<StageForward> stages;
    for (int s = 0; s < schedule.stages(); ++s) {
      const bool first = s % 2 == 0;
      const auto weight = ones({2, 4}, own, {replicate()}).tensor().detach().requires_grad_();
      stages.emplace_back([=](const TensorVector& x) -> TensorVector {
        take_a_nap(first ? forward.first : forward.second);
        return {NapsInBackward::apply(x[0] + weight, first ? backward.first : backward.second)};
      });
    }
    Runner runner({mesh, "pp"}, schedule, stages);
    const std::vector<TensorVector> inputs(microbatches, {at::ones({2, 4})});
    for (int step = 0; step < 60; ++step) {
      world.barrier();
      const auto start = NapClock::now();
      runner.step(inputs, [](const TensorVector& y, int) { return y[0].sum(); });
      world.barrier();
      if (world.rank() == 0 && step > 0) {
        best = std::min(best, std::chrono::duration<double, std::milli>(NapClock::now() - start).count());
      }
      const auto ends = all_reduce(at::full({}, world.rank() == 0 && best <= enough, at::kLong), mesh);
      if (ends.item<int64_t>() > 0) break;
    }
  });
  return best;
}

}  // namespace

TEST_CASE("ping pong: the schedule is right and each rank computes layer after layer", "[pipeline]") {
  CHECK(describe(ping_pong(1, 2)) == "rank0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank1: 1F0 1F1 1B0 1B1\n");
  for (int layers = 1; layers <= 4; ++layers) {
    for (int microbatches = 1; microbatches <= 5; ++microbatches) {
      const auto schedule = ping_pong(layers, microbatches);
      CAPTURE(describe(schedule));
      REQUIRE_NOTHROW(pipelining::check(schedule));
      REQUIRE(pipelining::test::Oracle(schedule).legal());
    }
  }
  CHECK_THROWS_WITH(ping_pong(0, 2), says("ping_pong got 0 layers and 2 microbatches"));
  CHECK_THROWS_WITH(ping_pong(2, 0), says("ping_pong got 2 layers and 0 microbatches"));
}

TEST_CASE("ping pong: the formula is what the simulator gives", "[pipeline]") {
  for (const auto& times : std::vector<PingPongTimes>{{1, 1, 0}, {1, 1, 0.5}, {2, 1, 0.25}, {1, 2, 0.25}, {1, 3, 4}, {5, 1, 2}, {0, 1, 0},
                                                      {1, 0, 1}, {1, 1.0625, 0}, {1.0625, 1, 0.03125}}) {
    for (int layers = 1; layers <= 5; ++layers) {
      for (int m = 1; m <= 7; ++m) {
        CAPTURE(times.first, times.second, times.message, layers, m);
        const auto schedule = ping_pong(layers, m);
        const PingPongTimes backward{times.first * 2, times.second * 1.5, times.message};
        const auto costs = ping_pong_costs(schedule, times, backward);
        const double forward = ping_pong_makespan(layers, m, times);
        const auto timeline = simulate(forward_only(schedule), costs);
        CHECK(timeline.makespan == forward);
        CHECK(simulate(schedule, costs).makespan == forward + ping_pong_makespan(layers, m, backward));
        CHECK(is_hidden(m, times) == (m >= microbatches_to_hide(times)));
      }
    }
  }
}

TEST_CASE("ping pong: a rank whose time is hidden costs a way there and back in all", "[pipeline]") {
  const PingPongTimes times{3, 2, 0.5};  // 3 m >= 3 + 2 + 2 0.5
  CHECK(microbatches_to_hide(times) == 2);
  CHECK(ping_pong_makespan(32, 2, times) == 33 * 2 * 3);  // attention alone
  CHECK(ping_pong_makespan(32, 1, times) == 32 * (3 + 2 + 1) + 3);
  const PingPongTimes experts{2, 3, 0.5};
  CHECK(ping_pong_makespan(32, 2, experts) == 32 * 2 * 3 + 2 * (2 + 0.5));  // experts, the ways to them and back, two stages
}

TEST_CASE("ping pong: stages that sleep take what the formula says", "[pipeline]") {
  constexpr int kLayers = 2;
  for (const auto& [first, second] : {std::pair{12.0, 12.0}, {16.0, 10.0}, {10.0, 16.0}}) {
    for (int m = 1; m <= 4; ++m) {
      const PingPongTimes forward{first, second, 0}, backward{second, first, 0};
      const double formula = ping_pong_makespan(kLayers, m, forward) + ping_pong_makespan(kLayers, m, backward);
      const double took = milliseconds_of_step(kLayers, m, forward, backward, 1.05 * formula);
      CAPTURE(first, second, m, is_hidden(m, forward), formula, took);
      CHECK((kSanitized || took <= 1.05 * formula));
      CHECK(took >= 0.99 * formula);
    }
  }
}
