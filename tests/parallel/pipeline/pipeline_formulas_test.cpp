// The orders of all schedules are right for many sizes, and have the bubbles, peaks and messages that are published.
#include "tests/catch.hpp"
#include "tests/support/pipeline_support.hpp"
#include "tests/support/refuses.hpp"
#include "tests/support/sanitizers.hpp"

#include <ctime>

namespace dtensor::pipelining::test {

namespace {

const std::vector<StageCost>& usual_costs() {
  static const std::vector<StageCost> costs{{1, 1, 1}, {2, 2, 1}, {1, 2, 1}, {3, 4, 2}, {1, 1.25, 0.75}};
  return costs;
}

double longest_span(const Timeline& timeline) {
  double longest = 0;
  for (const auto& rank : timeline.ranks) longest = std::max(longest, rank.span());
  return longest;
}

std::vector<int> peaks_of(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& rank : simulate(schedule).ranks) peaks.push_back(rank.peak);
  return peaks;
}

std::vector<int> early_peaks_of(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& rank : simulate(schedule).ranks) peaks.push_back(rank.peak_until_input_gradient);
  return peaks;
}

template <class Peak>
std::vector<int> by_rank(int ranks, Peak peak) {
  std::vector<int> peaks;
  for (int rank = 0; rank < ranks; ++rank) peaks.push_back(peak(rank));
  return peaks;
}

}  // namespace

TEST_CASE("pipeline schedules: all orders pass the checker", "[pipeline]") {
  int count = 0;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const int microbatches : {1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 24}) {
      for (const auto& schedule : every_schedule(ranks, microbatches, 4)) {
        INFO(what_of(schedule));
        CHECK_NOTHROW(check(schedule));
        CHECK_NOTHROW(check(with_messages(with_reductions(with_gathering(schedule, 1 + count % 3)))));
        ++count;
      }
    }
  }
  CHECK(count == 8 * 11 * (8 + 3 * 4));
}

TEST_CASE("pipeline schedules: the oracle finds them legal too", "[pipeline]") {
  for (const auto& [ranks, microbatches] : {std::pair{1, 2}, {2, 5}, {3, 2}, {4, 8}, {5, 7}}) {
    for (const auto& schedule : every_schedule(ranks, microbatches)) {
      INFO(what_of(schedule));
      CHECK(Oracle(schedule).legal());
      const auto messages = with_messages(schedule);
      CHECK(Oracle(messages).legal());
    }
  }
}

TEST_CASE("pipeline schedules: published bubbles", "[pipeline]") {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : {2 * p, 3 * p, 4 * p}) {
      for (const auto& cost : usual_costs()) {
        const auto [f, i, w] = cost;
        INFO(p << " ranks, " << m << " microbatches, costs " << f << " " << i << " " << w);
        const auto bubble = [&](const Schedule& schedule) {
          const auto timeline = simulate(schedule, {cost});
          const double chunks = static_cast<double>(schedule.stages()) / p;
          CHECK(timeline.ideal == Approx(m * chunks * (f + i + w)));
          return timeline.makespan - timeline.ideal;
        };
        const auto bubble_in_span = [&](const Schedule& schedule) {
          const auto timeline = simulate(schedule, {cost});
          return longest_span(timeline) - timeline.ideal;
        };
        CHECK(bubble(gpipe({p, m})) == Approx((p - 1) * (f + i + w)));
        CHECK(bubble(one_f_one_b({p, m})) == Approx((p - 1) * (f + i + w)));
        for (int v = 1; v <= 4; ++v) {  // of chunks, each of which takes 1/v of a rank's share
          CHECK(bubble(interleaved({p, m, v})) == Approx((p - 1) * (f + i + w)));
          CHECK(bubble(looped_bfs({p, m, v})) == Approx((p - 1) * (f + i + w)));
        }
        if (w <= f && w <= i) CHECK(bubble(zb1p({p, m})) == Approx((p - 1) * (f + i - w)));
        if (w <= f && w <= i) CHECK(bubble_in_span(zb2p({p, m})) == Approx((p - 1) * (f + i - 2 * w)));
      }
    }
  }
}

TEST_CASE("pipeline schedules: published bubbles of stages in a V", "[pipeline]") {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : {2 * p, 2 * p + 1, 4 * p}) {
      INFO(p << " ranks, " << m << " microbatches");
      for (const auto& rank : simulate(zbv({p, m})).ranks) CHECK(rank.span() == 6.0 * m);  // no bubble where F = I = W
      CHECK(simulate(zbv({p, m})).makespan == 6.0 * m + p - 1);
      // Half and two thirds of 1F1B's (p-1)(F+I+W), which is of whole shares.
      CHECK(simulate(v_half({p, m})).makespan <= 6.0 * m + 0.5 * 6 * (p - 1));
      CHECK(simulate(v_min({p, m})).makespan <= 6.0 * m + 2.0 / 3 * 6 * (p - 1) + 1);
      // (PP/2-1)(F&B + B - 3W), PP stages.
      CHECK(simulate(dualpipev({p, m})).makespan == 6.0 * m + (p - 1) * (3 + 2 - 3));
      CHECK(simulate(dualpipev({p, m}), {{2, 2, 1}}).makespan == 10.0 * m + (p - 1) * (5 + 3 - 3));
    }
  }
  CHECK(simulate(zbv({4, 8}), {{2, 2, 1}}).makespan == 86);
  CHECK(simulate(dualpipev({4, 10})).makespan == 66);
  CHECK(simulate(dualpipev({4, 8})).makespan == 54);
  Costs costs;
  costs.overlapped = 2.5;  // less than a forward and a backward: pairs hide something
  CHECK(simulate(dualpipev({4, 10}), costs).makespan < 66);
}

TEST_CASE("pipeline schedules: published peaks of activations", "[pipeline]") {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : {1, p, 2 * p, 4 * p}) {
      INFO(p << " ranks, " << m << " microbatches");
      CHECK(peaks_of(gpipe({p, m})) == by_rank(p, [&](int) { return m; }));
      CHECK(peaks_of(one_f_one_b({p, m})) == by_rank(p, [&](int r) { return std::min(m, p - r); }));
      for (int v = 1; v <= 4; ++v) {
        const int g = m / std::max(1, m / p);
        CHECK(peaks_of(interleaved({p, m, v})) == by_rank(p, [&](int r) { return std::min(m * v, (v - 1) * g + 2 * (p - 1 - r) + 1); }));
        CHECK(peaks_of(looped_bfs({p, m, v})) == by_rank(p, [&](int) { return m * v; }));
      }
      CHECK(peaks_of(zb1p({p, m})) == by_rank(p, [&](int) { return std::min(m, p); }));
      CHECK(early_peaks_of(zb1p({p, m})) == by_rank(p, [&](int r) { return std::min(m, p - r); }));
      CHECK(peaks_of(zb2p({p, m})) == by_rank(p, [&](int) { return std::min(m, 2 * p - 1); }));
      if (m >= 2 * p) CHECK(peaks_of(zbv({p, m})) == by_rank(p, [&](int) { return 2 * p; }));
      if (m >= 2 * p) CHECK(peaks_of(dualpipev({p, m})) == by_rank(p, [&](int) { return 2 * p + 1; }));
      for (const int peak : peaks_of(v_half({p, m}))) CHECK(peak <= p + 2);  // 1F1B: p stages, which are 2p halves
      for (const int peak : peaks_of(v_min({p, m}))) CHECK(peak <= (2 * p + 2) / 3 + 2);
    }
  }
}

TEST_CASE("pipeline schedules: messages and speed over one rank", "[pipeline]") {
  for (const auto& schedule : every_schedule(4, 10)) {
    INFO(what_of(schedule));
    int boundaries = 0;
    for (int stage = 0; stage + 1 < schedule.stages(); ++stage)
      boundaries += schedule.rank_of_stage[stage] != schedule.rank_of_stage[stage + 1];
    Costs costs;
    costs.message_bytes = 512;
    for (const auto& form : {schedule, with_messages(schedule)}) {
      const auto timeline = simulate(form, costs);
      CHECK(timeline.forward_messages == 10 * boundaries);
      CHECK(timeline.backward_messages == 10 * boundaries);
      CHECK(timeline.bytes == 2.0 * 10 * boundaries * 512);
      CHECK(timeline.makespan == simulate(schedule).makespan);
    }
    CHECK(simulate(forward_only(schedule)).backward_messages == 0);
  }
  const auto speed = [](const Schedule& schedule) { return 2 * simulate(schedule).ideal / simulate(schedule).makespan; };
  CHECK(speed(one_f_one_b({2, 8})) == Approx(1.78).margin(0.005));
  CHECK(speed(interleaved({2, 8, 2})) == Approx(1.88).margin(0.005));
  CHECK(speed(zb1p({2, 8})) == Approx(1.92).margin(0.005));
  CHECK(speed(zbv({2, 8})) == Approx(1.96).margin(0.005));
  CHECK(speed(dualpipev({2, 8})) == Approx(1.92).margin(0.005));
}

TEST_CASE("pipeline schedules: costs", "[pipeline]") {
  Costs costs;
  costs.message = 0.5;  // three hops forward and three back, for the first and for the last microbatch
  CHECK(simulate(gpipe({4, 8}), costs).makespan == 33 + 6 * 0.5);
  costs.stages = {{2, 2, 2}, {1, 1, 1}};
  CHECK(simulate(gpipe({2, 4}), costs).ideal == 4 * 6);
  dtensor::test::refuses("costs of 2", [&] { simulate(gpipe({3, 4}), costs); });
  dtensor::test::refuses("none below 0", [] { simulate(gpipe({3, 4}), {{1, -1, 1}}); });
}

TEST_CASE("pipeline schedules: sizes that make no sense", "[pipeline]") {
  using dtensor::test::refuses;
  refuses("gpipe got 0 ranks and 4 microbatches", [] { gpipe({0, 4}); });
  refuses("zbv has 2 stages on a rank; got 3 chunks", [] { zbv({4, 8, 3}); });
  refuses("1f1b has 1 stages on a rank; got 2 chunks", [] { one_f_one_b({4, 8, 2}); });
  refuses("interleaved got 2 ranks, -1 chunks", [] { interleaved({2, 2, -1}); });
  refuses("there is no schedule 'zb3p'; expected one of gpipe, 1f1b,", [] { make_schedule("zb3p", {2, 2}); });
  CHECK(make_schedule("INTERLEAVEDZeroBubble", {2, 4, 3}).ranks == interleaved_zb({2, 4, 3}).ranks);
}

TEST_CASE("pipeline schedules: 64 ranks and 512 microbatches in a second", "[pipeline]") {
  for (const auto& named : named_schedules()) {
    const auto begin = std::clock();
    const auto schedule = named.make({64, 512, named.chunks == 0 ? 4 : named.chunks});
    check(schedule);
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    INFO(named.name << " took " << seconds << " s");
    CHECK((dtensor::test::kSanitized || seconds < 1));
  }
}

}  // namespace dtensor::pipelining::test
