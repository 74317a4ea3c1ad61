// Schedules that are found for measured costs and a limit of memory.
#include "tests/catch.hpp"
#include "tests/support/pipeline_support.hpp"
#include "tests/support/refuses.hpp"

namespace dtensor::pipelining::test {

namespace {

int highest_peak(const Timeline& timeline) {
  int peak = 0;
  for (const auto& rank : timeline.ranks) peak = std::max(peak, rank.peak);
  return peak;
}

}  // namespace

TEST_CASE("pipeline automatic: never worse than a schedule with a name and always within the memory", "[pipeline]") {
  for (const auto& [ranks, microbatches, chunks] : {std::tuple{4, 8, 1}, {4, 8, 2}, {3, 7, 2}, {2, 5, 4}, {1, 3, 1}, {5, 3, 2}}) {
    for (const auto& stage : {StageCost{1, 1, 1}, {2, 2, 1}, {1, 1.3, 0.8}, {1, 1, 2}}) {
      for (const double message : {0.0, 0.5}) {
        Costs costs{stage};
        costs.message = message;
        for (const int most : {1 << 20, 2 * ranks * chunks, ranks * chunks, ranks * chunks / 2 + 1, chunks}) {
          if (most < chunks) continue;
          INFO(ranks << " ranks " << microbatches << " microbatches " << chunks << " chunks " << message << " a message, " << most
                     << " activations");
          const auto found = automatic({ranks, microbatches, chunks}, costs, most);
          const auto timeline = simulate(found, costs);
          CHECK(Oracle(found).legal());
          CHECK(highest_peak(timeline) <= most);
          CHECK(found.stages() == ranks * chunks);
          for (const auto& named : named_schedules()) {
            if (named.name == "automatic" || (named.chunks > 0 && named.chunks != chunks)) continue;
            const auto other = simulate(named.make({ranks, microbatches, chunks}), costs);
            if (highest_peak(other) <= most) CHECK(timeline.makespan <= other.makespan * (1 + 1e-6));
          }
          CHECK(automatic({ranks, microbatches, chunks}, costs, most).ranks == found.ranks);  // on every rank
        }
      }
    }
  }
}

TEST_CASE("pipeline automatic: what it reaches", "[pipeline]") {
  // Nothing is shorter: the last rank starts after three forwards and messages, and then never waits.
  Costs costs{{1, 1.3, 0.8}};
  costs.message = 0.5;
  CHECK(simulate(automatic({4, 8, 2}, costs), costs).makespan == Approx(3 * 1.5 + 16 * 3.1));
  CHECK(simulate(zbv({4, 8}), costs).makespan > 60);
  // Memory between that of schedules with names: better than the one below.
  CHECK(simulate(automatic({8, 32, 2}, {{2, 2, 1}}, 12), {{2, 2, 1}}).makespan < 0.95 * simulate(v_half({8, 32}), {{2, 2, 1}}).makespan);
  // Of those as short, the one with the least memory.
  CHECK(highest_peak(simulate(automatic({4, 8, 1}))) == 4);
  // Stages that differ: the first one is slow.
  costs.stages = {{2, 2, 2}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}};
  CHECK(simulate(automatic({4, 8, 1}, costs), costs).makespan < simulate(zb1p({4, 8}), costs).makespan);
}

TEST_CASE("pipeline automatic: what it refuses", "[pipeline]") {
  using dtensor::test::refuses;
  refuses("automatic may hold 1 activations on a rank; expected 2 or more", [] { automatic({4, 8, 2}, {}, 1); });
  refuses("none below 0", [] { automatic({4, 8, 2}, {{-1, 1, 1}}); });
  Costs costs;
  costs.stages.resize(3);
  refuses("there are costs of 3", [&] { automatic({4, 8, 1}, costs); });
}

TEST_CASE("pipeline automatic: weights fill what an order leaves", "[pipeline]") {
  // 1F1B's order with its backward split: ZB1P's makespan.
  const auto plan = plan_weights(one_f_one_b({4, 8}));
  REQUIRE(plan.has_value());
  CHECK(simulate(*plan).makespan == 27);
  const auto tight = plan_weights(one_f_one_b({4, 8}), {}, {.most_activations = 2});
  REQUIRE(tight.has_value());
  CHECK(highest_peak(simulate(*tight)) == 2);
  CHECK_FALSE(plan_weights(one_f_one_b({4, 8}), {}, {.most_activations = 0}).has_value());
}

}  // namespace dtensor::pipelining::test
