// Where the weights' gradients go: simulates ranks that follow an order of forwards and backwards, and do a W where they would wait.
#pragma once

#include <dtensor/parallel/pipeline/simulate.hpp>

#include <limits>
#include <optional>
#include <queue>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

struct PlanRules {
  // Activations that a rank may hold at once: then it does a W, or waits, before the next forward.
  int most_activations = std::numeric_limits<int>::max();
  // A backward that can run goes before forwards that would be next and cannot run yet.
  bool backwards_overtake = true;
  // So does a forward while so many more activations would fit; below 0: never.
  int forwards_overtake = -1;
  // A rank rather waits for what arrives within this share of the time of a W.
  double patience = 0;
};

// A schedule with the stages of `order` in which each rank runs the forwards and backwards of its list in about that order, backwards split
// into I and W. None if ranks would hold too many activations to go on. Expects an order that check() takes.
std::optional<Schedule> plan_weights(const Schedule& order, const Costs& costs = {}, const PlanRules& rules = {});

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

class Planner {
 public:
  Planner(const Schedule& order, const Costs& costs, const PlanRules& rules)
      : costs_(costs),
        rules_(rules),
        edges_(order),
        ends_(static_cast<size_t>(order.stages()) * order.microbatches * 2, kNever),
        ranks_(order.ranks.size()),
        result_(order) {
    for (auto& list : result_.ranks) list.clear();
    for (size_t rank = 0; rank < ranks_.size(); ++rank) read(ranks_[rank], order.ranks[rank]);
  }

  std::optional<Schedule> run() {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) events_.emplace(0.0, rank);
    while (!events_.empty()) {
      const auto [now, rank] = events_.top();
      events_.pop();
      if (ranks_[rank].busy_until <= now) decide(rank, now);
    }
    const bool all =
        std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.left == 0 && rank.next_weight == rank.weights.size(); });
    return all ? std::optional(std::move(result_)) : std::nullopt;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // The forwards or the backwards of one stage, with their places in the order of the rank.
  struct Lane {
    Kind kind;
    int stage;
    std::vector<std::pair<int, int>> passes{};  // (place, microbatch)
    size_t next = 0;
    bool done() const { return next == passes.size(); }
  };
  struct Rank {
    std::vector<Lane> lanes;
    std::vector<Action> weights;  // I is done,
    size_t next_weight = 0;       // and W not yet from here on
    size_t left = 0;
    int held = 0;
    double busy_until = 0;
  };

  static void read(Rank& rank, const std::vector<Action>& list) {
    for (const auto& action : list) {
      for (const auto& part : Parts(action)) {
        if (part.kind == Kind::W || !is_compute(part.kind)) continue;
        const auto kind = part.kind == Kind::F ? Kind::F : Kind::I;
        auto lane = std::ranges::find_if(rank.lanes, [&](const Lane& other) { return other.kind == kind && other.stage == part.stage; });
        if (lane == rank.lanes.end()) lane = rank.lanes.insert(lane, Lane{kind, part.stage});
        lane->passes.emplace_back(static_cast<int>(rank.left++), part.microbatch);
      }
    }
  }

  double& end_of(int stage, Kind kind, int microbatch) {
    return ends_[(static_cast<size_t>(stage) * 2 + (kind == Kind::F)) * result_.microbatches + microbatch];
  }

  // When the lane's next pass can run, as far as is known.
  double ready(const Lane& lane) {
    const int microbatch = lane.passes[lane.next].second;
    const bool forward = lane.kind == Kind::F;
    double when = forward ? 0.0 : end_of(lane.stage, Kind::F, microbatch);
    for (const int edge : forward ? edges_.into(lane.stage, microbatch) : edges_.out_of(lane.stage, microbatch)) {
      const int other = forward ? edges_.list[edge].from : edges_.list[edge].to;
      when = std::max(when, end_of(other, lane.kind, microbatch) + (edges_.crosses(edge) ? costs_.message : 0));
    }
    return when;
  }

  void decide(int number, double now) {
    auto& rank = ranks_[number];
    Lane* chosen = nullptr;
    double soonest = kNever;
    int first = std::numeric_limits<int>::max();
    for (const auto& lane : rank.lanes) {
      if (!lane.done()) first = std::min(first, lane.passes[lane.next].first);
    }
    for (auto& lane : rank.lanes) {
      if (lane.done() || !allowed(rank, lane, first)) continue;
      const double when = ready(lane);
      soonest = std::min(soonest, when);
      if (when <= now && (!chosen || lane.passes[lane.next].first < chosen->passes[chosen->next].first)) chosen = &lane;
    }
    if (chosen) {
      const int microbatch = chosen->passes[chosen->next++].second;
      --rank.left;
      start(number, {chosen->stage, chosen->kind, microbatch}, now);
    } else if (rank.next_weight < rank.weights.size()) {
      const auto weight = rank.weights[rank.next_weight];
      if (soonest - now < rules_.patience * duration(weight, costs_)) return;
      ++rank.next_weight;
      start(number, weight, now);
    }
  }

  bool allowed(const Rank& rank, const Lane& lane, int first) const {
    const bool next = lane.passes[lane.next].first == first;
    if (lane.kind == Kind::I) return next || rules_.backwards_overtake;
    if (rank.held >= rules_.most_activations) return false;
    return next || (rules_.forwards_overtake >= 0 && rank.held < rules_.most_activations - rules_.forwards_overtake);
  }

  void start(int number, const Action& action, double now) {
    auto& rank = ranks_[number];
    const double end = now + duration(action, costs_);
    rank.busy_until = end;
    result_.ranks[number].push_back(action);
    events_.emplace(end, number);
    if (action.kind == Kind::W) {
      --rank.held;
      return;
    }
    const bool forward = action.kind == Kind::F;
    end_of(action.stage, action.kind, action.microbatch) = end;
    if (forward) ++rank.held;
    if (!forward) rank.weights.push_back({action.stage, Kind::W, action.microbatch});
    for (const int edge : forward ? edges_.out_of(action.stage, action.microbatch) : edges_.into(action.stage, action.microbatch)) {
      if (!edges_.crosses(edge)) continue;
      events_.emplace(end + costs_.message, edges_.rank_of[forward ? edges_.list[edge].to : edges_.list[edge].from]);
    }
  }

  const Costs& costs_;
  const PlanRules& rules_;
  const Edges edges_;
  std::vector<double> ends_;  // of F and I, by stage and microbatch
  std::vector<Rank> ranks_;
  Schedule result_;
  using Event = std::pair<double, int>;  // a rank may have something to do
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace detail

inline std::optional<Schedule> plan_weights(const Schedule& order, const Costs& costs, const PlanRules& rules) {
  detail::check_costs(order, costs);
  return detail::Planner(order, costs, rules).run();
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
