// SkipPipe (Blagoev et al., 2025): each microbatch passes only some of the stages, in an order of its own, so that ranks wait less. A model
// whose blocks add to their input (a transformer) can be trained so, and later run with fewer blocks.
//
//   dt::PipelineOptions options{.microbatches = 16};
//   options.make_schedule = [](const auto& size) { return dt::pipelining::skip_pipe(size, {.skipped = 0.33}); };
#pragma once

#include <dtensor/parallel/pipeline/gaps.hpp>

#include <cmath>
#include <limits>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

struct SkipPipeOptions {
  double skipped = 1.0 / 3;  // the share of the stages between the first and the last that a microbatch does not pass
  bool reorder = true;       // it passes the others in any order
  Costs costs{};
};

// Stage s on rank s. Every microbatch begins with the first stage and ends with the last one; of those between, each passes as many, and
// each of them is passed by as many microbatches (by one more at most). Paths are chosen one after the other, so that a microbatch comes
// back to the first stage as early as the ranks' time allows that is not taken yet. A stage does its backwards in the order of the
// microbatches, so that its gradients are summed as on one device; it holds no more activations than under 1F1B. With nothing skipped it is
// 1F1B.
Schedule skip_pipe(const PipelineSize& size, const SkipPipeOptions& options = {});

// The same along given paths.
Schedule along_paths(const PipelineSize& size, const std::vector<std::vector<int>>& paths, const Costs& costs = {});

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

class PathPlanner {
 public:
  PathPlanner(const PipelineSize& size, const Costs& costs)
      : stages_(size.ranks), costs_(costs), ranks_(stages_), held_(stages_), last_backward_(stages_, 0.0) {
    result_.name = "skip_pipe";
    result_.microbatches = size.microbatches;
    result_.rank_of_stage = loop_placement(stages_, 1);
    check_costs(result_, costs);
  }

  // A path that has come to a stage, and when its forward there ends.
  struct Way {
    std::vector<int> path;
    std::vector<double> starts;  // of the forwards
    double end = 0;
    bool passes(int stage) const { return std::ranges::find(path, stage) != path.end(); }
  };

  Way begin() const { return extended({}, 0); }

  Way extended(const Way& way, int stage) const {
    auto next = way;
    const double arrives = way.path.empty() ? 0 : way.end + costs_.message;
    next.path.push_back(stage);
    next.starts.push_back(room_for_forward(stage, arrives));
    next.end = next.starts.back() + forward(stage);
    return next;
  }

  // When each backward along it begins, the last stage's first.
  std::vector<double> backwards(const Way& way) const {
    std::vector<double> starts;
    double ready = way.end;
    for (size_t i = way.path.size(); i-- > 0;) {
      const int stage = way.path[i];
      // Its own forwards are not taken yet, and are all over by then.
      starts.push_back(ranks_[stage].first_room(std::max(ready, last_backward_[stage]), backward(stage)));
      ready = starts.back() + backward(stage) + costs_.message;
    }
    return starts;
  }

  void take(const Way& way) {
    const int microbatch = static_cast<int>(result_.paths.size());
    const auto back = backwards(way);
    for (size_t i = 0; i < way.path.size(); ++i) {
      const int stage = way.path[i];
      const double ends = back[way.path.size() - 1 - i] + backward(stage);
      ranks_[stage].take({stage, Kind::F, microbatch}, way.starts[i], forward(stage));
      ranks_[stage].take({stage, Kind::B, microbatch}, ends - backward(stage), backward(stage));
      held_[stage].push_back({way.starts[i], ends});
      last_backward_[stage] = ends;
    }
    result_.paths.push_back(way.path);
  }

  Schedule result() && {
    result_.ranks = lists_of(ranks_);
    return std::move(result_);
  }

 private:
  const StageCost& cost(int stage) const { return costs_.stages.empty() ? costs_.stage : costs_.stages[stage]; }
  double forward(int stage) const { return cost(stage).forward; }
  double backward(int stage) const { return cost(stage).input_gradient + cost(stage).weight_gradient; }

  // From `begin` on, when the stage holds fewer activations than it may, then and later.
  double room_for_forward(int stage, double begin) const {
    const size_t most = stages_ - stage;
    std::vector<double> ends;
    for (const auto& span : held_[stage]) ends.push_back(span.end);
    if (ends.size() >= most) {
      std::ranges::sort(ends);
      begin = std::max(begin, ends[ends.size() - most]);
    }
    return ranks_[stage].first_room(begin, forward(stage));
  }

  int stages_;
  const Costs& costs_;
  std::vector<RankTime> ranks_;
  std::vector<std::vector<TimeSpan>> held_;  // activations, by stage
  std::vector<double> last_backward_;        // when it ends
  Schedule result_;
};

// The middle stages that a microbatch may pass next, and those that it must: the others would lack microbatches.
class Quotas {
 public:
  Quotas(int stages, int microbatches, int each) : left_(stages, 0), microbatches_(microbatches), each_(each) {
    const int middle = stages - 2;
    for (int i = 0; i < microbatches * each; ++i) ++left_[1 + i % middle];
  }

  // `ascending`: stages come in the model's order.
  bool allows(const PathPlanner::Way& way, int stage, bool ascending) const {
    if (left_[stage] == 0 || way.passes(stage)) return false;
    int needed = 0, possible = 0;
    for (int s = 1; s + 1 < static_cast<int>(left_.size()); ++s) {
      if (s == stage || way.passes(s)) continue;
      const bool comes_too_late = ascending && s < stage, must = left_[s] == microbatches_;
      if (must && comes_too_late) return false;
      needed += must;
      possible += left_[s] > 0 && !comes_too_late;
    }
    const int more = each_ - static_cast<int>(way.path.size());  // the path has the first stage too
    return needed <= more && more <= possible;
  }

  void take(const PathPlanner::Way& way) {
    for (const int stage : way.path) left_[stage] -= left_[stage] > 0;
    --microbatches_;
  }

 private:
  std::vector<int> left_;
  int microbatches_, each_;
};

// Among many orders and choices of stages, those that came farthest in the least time are followed.
inline PathPlanner::Way best_path(const PathPlanner& planner, const Quotas& quotas, int stages, int middle, bool reorder) {
  constexpr size_t kFollowed = 64;
  std::vector<PathPlanner::Way> ways{planner.begin()};
  for (int i = 0; i < middle; ++i) {
    std::vector<PathPlanner::Way> next;
    for (const auto& way : ways) {
      for (int stage = reorder ? 1 : way.path.back() + 1; stage + 1 < stages; ++stage) {
        if (quotas.allows(way, stage, !reorder)) next.push_back(planner.extended(way, stage));
      }
    }
    std::ranges::stable_sort(next, {}, &PathPlanner::Way::end);
    next.resize(std::min(next.size(), kFollowed));
    ways = std::move(next);
  }
  double soonest = std::numeric_limits<double>::infinity();
  PathPlanner::Way best;
  for (const auto& way : ways) {
    auto whole = stages > 1 ? planner.extended(way, stages - 1) : way;
    const double end = planner.backwards(whole).back();
    if (end < soonest) soonest = end, best = std::move(whole);
  }
  return best;
}

inline Schedule planned(const PipelineSize& size, const SkipPipeOptions& options, bool reorder) {
  const int between = std::max(0, size.ranks - 2);
  const int passed = static_cast<int>(std::lround(between * (1 - options.skipped)));
  PathPlanner planner(size, options.costs);
  std::optional<Quotas> quotas;
  if (between > 0) quotas.emplace(size.ranks, size.microbatches, passed);
  for (int i = 0; i < size.microbatches; ++i) {
    const auto path =
        quotas ? best_path(planner, *quotas, size.ranks, passed, reorder) : best_path(planner, {3, 1, 0}, size.ranks, 0, false);
    planner.take(path);
    if (quotas) quotas->take(path);
  }
  auto schedule = std::move(planner).result();
  if (passed == between) schedule.paths.clear();
  return schedule;
}

}  // namespace detail

inline Schedule along_paths(const PipelineSize& size, const std::vector<std::vector<int>>& paths, const Costs& costs) {
  if (static_cast<int>(paths.size()) != size.microbatches)
    detail::refuse(
        {"along_paths got ", static_cast<int>(paths.size()), " paths of ", size.microbatches, " microbatches; expected one each"});
  detail::PathPlanner planner(size, costs);
  for (const auto& path : paths) {
    detail::PathPlanner::Way way;
    for (const int stage : path) {
      if (stage < 0 || stage >= size.ranks)
        detail::refuse({"along_paths got stage ", stage, " of ", size.ranks, "; expected stages from 0 on"});
      way = planner.extended(way, stage);
    }
    planner.take(way);
  }
  auto schedule = std::move(planner).result();
  check(schedule);
  return schedule;
}

inline Schedule skip_pipe(const PipelineSize& size, const SkipPipeOptions& options) {
  if (size.ranks < 1 || size.microbatches < 1 || size.chunks > 1)
    detail::refuse({"skip_pipe got ", size.ranks, " ranks, ", size.microbatches, " microbatches and ", size.chunks,
                    " stages of a rank; expected one of the last, and one or more of the others"});
  if (!(options.skipped >= 0 && options.skipped <= 1))
    detail::refuse({"skip_pipe is to skip a share of ", detail::number(options.skipped), "; expected 0 to 1"});
  auto schedule = detail::planned(size, options, false);
  if (options.reorder && !schedule.paths.empty()) {
    auto other = detail::planned(size, options, true);
    if (simulate(other, options.costs).makespan < simulate(schedule, options.costs).makespan) schedule = std::move(other);
  }
  check(schedule);
  return schedule;
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
