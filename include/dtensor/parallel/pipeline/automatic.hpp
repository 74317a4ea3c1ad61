// The best schedule found for measured costs and a limit of memory.
#pragma once

#include <dtensor/parallel/pipeline/v_schedules.hpp>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Of the schedules with these ranks, microbatches and chunks (by default one stage a rank; with two, stages in a loop and in a V), and of
// many orders between and beside them, the one with the least makespan, and of those the one that holds the fewest activations. No rank
// holds more than `most_activations`, of one stage and microbatch each, from F until W (or B). The result depends on the arguments alone,
// so all ranks find the same. Throws where none fits.
Schedule automatic(const PipelineSize& sizes, const Costs& costs = {}, int most_activations = std::numeric_limits<int>::max());

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// Keeps the best of the schedules that it is shown.
class Search {
 public:
  Search(const Costs& costs, int most) : costs_(costs), most_(most) {}

  // Whether it is the best so far.
  bool consider(Schedule schedule) {
    const auto timeline = simulate_checked(schedule, costs_);
    for (const auto& list : schedule.ranks) looked_at_ += static_cast<int64_t>(list.size());
    int peak = 0;
    for (const auto& rank : timeline.ranks) peak = std::max(peak, rank.peak);
    fewest_ = std::min(fewest_, peak);
    if (peak > most_) return false;
    const double margin = kMargin * timeline.makespan;
    const bool better = timeline.makespan < makespan_ - margin || (timeline.makespan < makespan_ + margin && peak < peak_);
    if (best_ && !better) return false;
    least_possible_ = least_makespan(schedule);
    best_ = std::move(schedule), makespan_ = timeline.makespan, peak_ = peak;
    return true;
  }

  // The forwards and backwards of an order, with its W's where they fit. What is best is tried again with fewer activations.
  void consider_plans_of(const Schedule& order) {
    for (const double patience : {0.0, 0.5, 1.0}) {
      for (const auto& [overtakes, margin] : {std::pair{false, -1}, {true, -1}, {true, 2}, {true, 1}, {true, 0}}) {
        if (enough()) return;
        PlanRules rules{most_, overtakes, margin, patience};
        for (bool better = true; better && !took_long();) {
          auto plan = plan_weights(order, costs_, rules);
          better = plan && consider(*std::move(plan));
          rules.most_activations = peak_ - 1;
        }
      }
      if (costs_are_even()) break;  // then nothing arrives while a W is under way
    }
  }

  // Whether there is nothing better, or to look further would take seconds.
  bool enough() const { return took_long() || (best_ && makespan_ < least_possible_ * (1 + kMargin)); }
  std::optional<Schedule>& best() { return best_; }
  int fewest() const { return fewest_; }

 private:
  static constexpr int64_t kMostActions = 2'000'000;
  static constexpr double kMargin = 1e-9;

  bool took_long() const { return best_ && looked_at_ > kMostActions; }

  bool costs_are_even() const {
    const auto& [forward, input, weight] = costs_.stage;
    return costs_.stages.empty() && costs_.message == 0 && forward == input && input == weight;
  }

  // No rank ends before its first microbatch has come to it, and it has computed all.
  double least_makespan(const Schedule& schedule) const {
    std::vector<double> first(schedule.ranks.size(), -1), work(schedule.ranks.size(), 0);
    double arrival = 0;
    for (int stage = 0; stage < schedule.stages(); ++stage) {
      const int rank = schedule.rank_of_stage[stage];
      if (stage > 0 && schedule.rank_of_stage[stage - 1] != rank) arrival += costs_.message;
      if (first[rank] < 0) first[rank] = arrival;
      work[rank] += schedule.microbatches * duration(overlapped(stage, 0, stage, 0), {costs_.stage, costs_.stages});
      arrival += duration({stage, Kind::F, 0}, costs_);
    }
    double least = 0;
    for (size_t rank = 0; rank < work.size(); ++rank) least = std::max(least, first[rank] + work[rank]);
    return least;
  }

  const Costs& costs_;
  const int most_;
  int64_t looked_at_ = 0;
  std::optional<Schedule> best_;
  double makespan_ = 0, least_possible_ = 0;
  int peak_ = 0, fewest_ = std::numeric_limits<int>::max();
};

// Rounds of so few microbatches that their activations fit, with all forwards of a round before its backwards.
inline Schedule in_small_rounds(const PipelineSize& sizes, int chunks, bool v, int length) {
  Schedule order{"rounds", sizes.microbatches, v ? v_placement(sizes.ranks, chunks) : loop_placement(sizes.ranks, chunks), {}};
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    const auto stages = stages_of(order, rank);
    auto& list = order.ranks.emplace_back();
    for (int begin = 0; begin < sizes.microbatches; begin += length) {
      const int end = std::min(begin + length, sizes.microbatches);
      for (const int stage : stages) {
        for (int i = begin; i < end; ++i) list.push_back({stage, Kind::F, i});
      }
      for (const int stage : reversed(stages)) {
        for (int i = begin; i < end; ++i) list.push_back({stage, Kind::B, i});
      }
    }
  }
  return order;
}

inline std::vector<Schedule> orders_for(const PipelineSize& sizes, int chunks, int most) {
  std::vector<Schedule> orders;
  const PipelineSize of{sizes.ranks, sizes.microbatches, chunks};
  if (chunks == 1) orders = {one_f_one_b(of), zb1p(of), zb2p(of), gpipe(of)};
  if (chunks == 2) orders = {v_min(of), v_half(of), zbv(of)};
  if (chunks > 1) {
    for (auto& order : {interleaved_zb(of), interleaved(of), looped_bfs(of)}) orders.push_back(order);
  }
  for (const int hops : {3, 4}) orders.push_back(one_f_one_b("turns", of, chunks, hops, /*split=*/true, /*behind=*/0));
  for (const bool v : {true, false}) {
    if (v && chunks != 2) continue;
    const int fitting = std::clamp(most / chunks, 1, sizes.microbatches);
    orders.push_back(in_small_rounds(of, chunks, v, fitting));
    if (fitting > 1) orders.push_back(in_small_rounds(of, chunks, v, (fitting + 1) / 2));
  }
  return orders;
}

}  // namespace detail

inline Schedule automatic(const PipelineSize& sizes, const Costs& costs, int most_activations) {
  detail::check_sizes("automatic", sizes, 0);
  const int chunks = std::max(sizes.chunks, 1);
  if (most_activations < chunks)
    detail::refuse({"automatic may hold ", most_activations, " activations on a rank; expected ", chunks,
                    " or more; hint: one microbatch has one in each of the rank's ", chunks, " stages"});
  const auto orders = detail::orders_for(sizes, chunks, most_activations);
  detail::check_costs(orders.front(), costs);
  detail::Search search(costs, most_activations);
  for (const auto& order : orders) {
    if (order.name != "rounds" && order.name != "turns") search.consider(order);
  }
  if (chunks == 2) search.consider(dualpipev(sizes));
  for (const auto& order : orders) search.consider_plans_of(order);
  auto& best = search.best();
  if (!best)
    detail::refuse({"automatic found no schedule that holds at most ", most_activations, " activations on a rank; the least found is ",
                    search.fewest(), "; hint: fewer chunks"});
  best->name = "automatic";
  return *std::move(best);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
