// What a schedule takes, for given costs: when each action runs, how long ranks wait, how many activations they hold, what they send.
#pragma once

#include <dtensor/parallel/pipeline/check.hpp>

#include <cstdint>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Times of one stage and microbatch, in any unit.
struct StageCost {
  double forward = 1, input_gradient = 1, weight_gradient = 1;
};

struct Costs {
  StageCost stage{};
  std::vector<StageCost> stages{};  // of each stage, where they differ (the embedding and the head)
  double message = 0;               // from when a message is sent until it can be used
  double overlapped = -1;           // of a pair; below 0: what its forward and backward take one after the other
  double message_bytes = 0;
};

struct RankTimes {
  double start = 0, end = 0;  // of its first and last action
  double busy = 0;            // computing
  // Activations (of one stage and microbatch) that it holds at once, if W frees them (or B), and if I already does.
  int peak = 0, peak_until_input_gradient = 0;
  int64_t messages = 0;  // sent

  double span() const { return end - start; }
  double bubble() const { return span() > 0 ? 1 - busy / span() : 0; }  // the share of its own span that it waits
};

struct TimeSpan {
  double start = 0, end = 0;
};

struct Timeline {
  double makespan = 0;  // from the first action of any rank to the last
  double ideal = 0;     // what the busiest rank computes
  std::vector<RankTimes> ranks;
  std::vector<std::vector<TimeSpan>> actions;  // of each rank, in the order of its list
  int64_t forward_messages = 0, backward_messages = 0;
  double bytes = 0;

  double bubble() const { return makespan > 0 ? 1 - ideal / makespan : 0; }  // the share of the makespan that the busiest rank waits
};

// Runs the schedule on ranks that compute one action at a time, in order, and send without waiting. Throws what check() throws.
Timeline simulate(const Schedule& schedule, const Costs& costs = {});

// What an action takes.
double duration(const Action& action, const Costs& costs);

// "makespan 33 ideal 24 bubble 0.2727 peak [4, 3, 2, 1]"
std::string summary(const Timeline& timeline);

// -- How -----------------------------------------------------------------------------------------------------------------

inline double duration(const Action& action, const Costs& costs) {
  if (action.kind == Kind::OVERLAP_F_B && costs.overlapped >= 0) return costs.overlapped;
  double sum = 0;
  for (const auto& part : Parts(action)) {
    const auto& cost = static_cast<size_t>(part.stage) < costs.stages.size() ? costs.stages[part.stage] : costs.stage;
    if (part.kind == Kind::F) sum += cost.forward;
    if (part.kind == Kind::I || part.kind == Kind::B) sum += cost.input_gradient;
    if (part.kind == Kind::W || part.kind == Kind::B) sum += cost.weight_gradient;
  }
  return sum;
}

inline std::string summary(const Timeline& timeline) {
  std::string peaks;
  for (const auto& rank : timeline.ranks) peaks += (peaks.empty() ? "" : ", ") + std::to_string(rank.peak);
  return fmt::format("makespan {:g} ideal {:g} bubble {:.4f} peak [{}]", timeline.makespan, timeline.ideal, timeline.bubble(), peaks);
}

namespace detail {

inline void check_costs(const Schedule& schedule, const Costs& costs) {
  const auto valid = [](const StageCost& cost) { return cost.forward >= 0 && cost.input_gradient >= 0 && cost.weight_gradient >= 0; };
  if (!(valid(costs.stage) && std::ranges::all_of(costs.stages, valid) && costs.message >= 0))
    refuse({"costs are forward ", number(costs.stage.forward), ", input gradient ", number(costs.stage.input_gradient),
            ", weight gradient ", number(costs.stage.weight_gradient), ", message ", number(costs.message),
            "; expected none below 0; hint: see Costs"});
  if (!costs.stages.empty() && costs.stages.size() != schedule.rank_of_stage.size())
    refuse({name_of(schedule), " has ", schedule.stages(), " stages, and there are costs of ", costs.stages.size(),
            "; expected as many; hint: Costs::stage is for stages that are alike"});
}

// The most activations that a list holds at once, when `frees` says which backwards end them.
template <class Frees>
int peak_of(const std::vector<Action>& list, Frees frees) {
  int held = 0, peak = 0;
  bool keeps = false;  // a pass of forwards only needs nothing afterwards
  for (const auto& action : list) {
    for (const auto& part : Parts(action)) {
      if (part.kind == Kind::F) peak = std::max(peak, ++held);
      if (frees(part.kind)) --held, keeps = true;
    }
  }
  return keeps ? peak : std::min(peak, 1);
}

inline void count_messages(const Schedule& schedule, const Costs& costs, Timeline& timeline) {
  const Edges edges(schedule);
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const auto& action : schedule.ranks[rank]) {
      if (!is_compute(action.kind)) continue;
      for (const auto& part : Parts(action)) {
        if (part.kind == Kind::W) continue;
        const bool forward = part.kind == Kind::F;
        const auto& along = forward ? edges.out_of(part.stage, part.microbatch) : edges.into(part.stage, part.microbatch);
        const auto count = std::ranges::count_if(along, [&](int edge) { return edges.crosses(edge); });
        timeline.ranks[rank].messages += count;
        (forward ? timeline.forward_messages : timeline.backward_messages) += count;
      }
    }
  }
  timeline.bytes = static_cast<double>(timeline.forward_messages + timeline.backward_messages) * costs.message_bytes;
}

// Of a schedule that check() has found to be right.
inline Timeline simulate_checked(const Schedule& schedule, const Costs& costs) {
  Timeline timeline;
  timeline.ranks.resize(schedule.ranks.size());
  for (const auto& list : schedule.ranks) timeline.actions.emplace_back(list.size());
  Progress progress(schedule, {.message = costs.message});
  progress.run([&](const Action& action) { return duration(action, costs); },
               [&](int rank, int position, double start, double end) {
                 timeline.actions[rank][position] = {start, end};
               });
  double first = 0, last = 0;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const auto& list = schedule.ranks[rank];
    auto& times = timeline.ranks[rank];
    bool any = false;
    for (size_t i = 0; i < list.size(); ++i) {
      if (!is_compute(list[i].kind)) continue;
      const auto [start, end] = timeline.actions[rank][i];
      if (!std::exchange(any, true)) times.start = start;
      times.end = end;
      times.busy += duration(list[i], costs);
    }
    times.peak = peak_of(list, [](Kind kind) { return kind == Kind::W || kind == Kind::B; });
    times.peak_until_input_gradient = peak_of(list, [](Kind kind) { return kind == Kind::I || kind == Kind::B; });
    first = rank == 0 ? times.start : std::min(first, times.start);
    last = std::max(last, times.end);
    timeline.ideal = std::max(timeline.ideal, times.busy);
  }
  timeline.makespan = last - first;
  count_messages(schedule, costs, timeline);
  return timeline;
}

}  // namespace detail

inline Timeline simulate(const Schedule& schedule, const Costs& costs) {
  check(schedule, detail::trains(schedule) ? Pass::training : Pass::forward);
  detail::check_costs(schedule, costs);
  return detail::simulate_checked(schedule, costs);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
