// How many ranks attention and experts get.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/pipeline/plan_disaggregated.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

const DisaggregatedModel kPlannedModel{
    .layers = 32, .dim = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .hidden = 14336, .experts = 8};
const DeviceRates kPlannedRates{.flops = 4e14, .memory_bandwidth = 3e12, .network = 5e10, .latency = 1e-5};

}  // namespace

TEST_CASE("disaggregated plan: times are those that one reckons by hand", "[experts][pipeline]") {
  // 2 ranks: 4 sequences of 100 tokens in one microbatch. Everything is bound by arithmetic, with a memory that takes no time.
  const DisaggregatedModel model{.layers = 3, .dim = 10, .heads = 2, .kv_heads = 1, .head_dim = 5, .hidden = 20, .experts = 4, .top_k = 2,
                                 .element_size = 4};
  const DeviceRates rates{.flops = 1e6, .memory_bandwidth = 1e15, .network = 1e6, .latency = 0.5};
  const auto plan = plan_disaggregated(model, {.sequences = 4, .length = 100, .backward = false}, 2, rates, {.most_microbatches = 1});
  CHECK(plan.attention_ranks == 1);
  CHECK(plan.expert_ranks == 1);
  const double weights = 10 * (10 + 2 * 5) + 10 * 10 + 10 * 4;  // queries, keys and values; outputs; the router
  CHECK(plan.forward.first == Approx(400 * (2 * weights + 4 * 50 * 10) / 1e6));
  CHECK(plan.forward.second == Approx(2 * 800 * 3 * 10 * 20 / 1e6));
  CHECK(plan.forward.message == Approx(0.5 + 400 * 10 * 4 / 1e6));
  CHECK(plan.seconds == Approx(pipelining::ping_pong_makespan(3, 1, plan.forward)));
  CHECK_FALSE(plan.hidden);
}

TEST_CASE("disaggregated plan: the best of all splits", "[experts][pipeline]") {
  for (const int ranks : {2, 5, 9, 16}) {
    for (const bool cached : {false, true}) {
      CAPTURE(ranks, cached);
      const DisaggregatedStep trains{.sequences = 64, .length = 2048};
      const DisaggregatedStep generates{.sequences = 256, .context = 2000, .cached = true, .backward = false};
      const auto& step = cached ? generates : trains;
      const auto best = plan_disaggregated(kPlannedModel, step, ranks, kPlannedRates);
      CHECK(best.attention_ranks + best.expert_ranks == ranks);
      CHECK(8 % best.expert_ranks == 0);
      for (int m = 1; m <= 8; ++m) {  // nothing with fewer or as many microbatches is faster
        const auto other = plan_disaggregated(kPlannedModel, step, ranks, kPlannedRates, {.most_microbatches = m});
        CHECK(best.seconds <= other.seconds);
        if (m >= best.microbatches) CHECK(other.microbatches == best.microbatches);
      }
      // In training more microbatches hide more. A batch that generates reads all experts for each of them.
      if (!cached) CHECK(best.microbatches > 1);
    }
  }
}

TEST_CASE("disaggregated plan: who has more to do gets more ranks", "[experts][pipeline]") {
  const DisaggregatedStep step{.sequences = 64, .length = 2048};
  const auto usual = plan_disaggregated(kPlannedModel, step, 12, kPlannedRates);
  auto few = kPlannedModel;
  few.hidden = 512;
  const auto light = plan_disaggregated(few, step, 12, kPlannedRates);
  CHECK(light.expert_ranks < usual.expert_ranks);
  auto slow = kPlannedRates;
  slow.network = 1e9;
  CHECK(plan_disaggregated(kPlannedModel, step, 12, slow).seconds > usual.seconds);
  auto quick = kPlannedRates;  // other devices for the experts
  quick.flops *= 8, quick.memory_bandwidth *= 8;
  CHECK(plan_disaggregated(kPlannedModel, step, 12, kPlannedRates, {.experts = quick}).seconds < usual.seconds);
  const DisaggregatedStep many{.sequences = 4096, .context = 2000, .cached = true, .backward = false};
  const auto large = plan_disaggregated(kPlannedModel, many, 12, kPlannedRates);
  CHECK(large.hidden);  // enough tokens for each expert
  CHECK(large.microbatches > 1);
}

TEST_CASE("disaggregated plan: what does not fit and what is refused", "[experts][pipeline][errors]") {
  const DisaggregatedStep step{.sequences = 64, .length = 2048};
  auto small = kPlannedRates;
  small.memory = 200e9;  // the experts of one rank take 16 bytes x 45.1e9 / ranks
  CHECK(plan_disaggregated(kPlannedModel, step, 12, small).expert_ranks >= 4);
  small.memory = 1e9;
  CHECK_THROWS_WITH(plan_disaggregated(kPlannedModel, step, 12, small),
                    says("no split of 12 ranks into those of attention and those of 8 experts"));
  CHECK_THROWS_WITH(plan_disaggregated(kPlannedModel, step, 1, kPlannedRates), says("got 1 ranks and 8 microbatches at most"));
  CHECK_THROWS_WITH(plan_disaggregated(kPlannedModel, {}, 4, kPlannedRates), says("0 sequences of 1; expected positive numbers"));
  CHECK_THROWS_WITH(plan_disaggregated(kPlannedModel, step, 4, {}), says("got 0 operations"));
  auto endless = kPlannedRates;
  endless.network = HUGE_VAL;
  CHECK_THROWS_WITH(plan_disaggregated(kPlannedModel, step, 4, endless), says("inf bytes sent a second"));
  auto negative = step;
  negative.context = -1;
  CHECK_THROWS_WITH(plan_disaggregated(kPlannedModel, negative, 4, kPlannedRates), says("got a context of -1 positions"));
  auto model = kPlannedModel;
  model.parameter_bytes = -16;
  CHECK_THROWS_WITH(plan_disaggregated(model, step, 4, kPlannedRates), says("and -16 bytes of a parameter"));
}
