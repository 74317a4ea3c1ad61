// A pipeline's schedule as data: which rank has which stages, and what it does in which order. Any function may make one.
#pragma once

#include <dtensor/parallel/pipeline/action.hpp>

#include <algorithm>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Stage `from` feeds stage `to`.
struct StageEdge {
  int from = 0, to = 0;
  bool operator==(const StageEdge&) const = default;
};

struct Schedule {
  std::string name;
  int microbatches = 0;
  std::vector<int> rank_of_stage;          // of each stage, in the model's order
  std::vector<std::vector<Action>> ranks;  // what each rank does, in this order
  std::vector<StageEdge> edges{};          // which stage feeds which later ones; none: each stage feeds the next one
  std::vector<std::vector<int>> paths{};   // the stages that each microbatch passes, in this order; none: all. In place of `edges`

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
  bool passes(int stage, int microbatch) const {
    return paths.empty() || std::ranges::find(paths[microbatch], stage) != paths[microbatch].end();
  }
  // The stages that a microbatch passes.
  std::vector<int> path(int microbatch) const;
};

// What a generator is asked for. Without a number of chunks (stages of a rank), the schedule has the usual one.
struct PipelineSize {
  int ranks = 1, microbatches = 1, chunks = 0;
};

// Stage s is on rank s mod `ranks`.
std::vector<int> loop_placement(int ranks, int chunks);
// Ranks 0, 1, ..., then back again: the last stage of two chunks is on rank 0, beside the first.
std::vector<int> v_placement(int ranks, int chunks = 2);

// What feeds what: `edges`, or its default, or what the paths go along.
std::vector<StageEdge> edges_of(const Schedule& schedule);

// A line for each rank: "rank0: 0F0 0F1 ...", of what it computes.
std::string describe(const Schedule& schedule);

// The schedule of an evaluation: forwards (and their messages) only.
Schedule forward_only(const Schedule& schedule);

// The same without messages, gathering and reducing.
Schedule compute_only(const Schedule& schedule);

// -- How -----------------------------------------------------------------------------------------------------------------

inline std::vector<int> loop_placement(int ranks, int chunks) {
  std::vector<int> ranks_of(static_cast<size_t>(ranks) * chunks);
  for (size_t stage = 0; stage < ranks_of.size(); ++stage) ranks_of[stage] = static_cast<int>(stage) % ranks;
  return ranks_of;
}

inline std::vector<int> v_placement(int ranks, int chunks) {
  auto ranks_of = loop_placement(ranks, chunks);
  for (size_t stage = 0; stage < ranks_of.size(); ++stage) {
    if (stage / ranks % 2 == 1) ranks_of[stage] = ranks - 1 - ranks_of[stage];
  }
  return ranks_of;
}

inline std::vector<int> Schedule::path(int microbatch) const {
  if (!paths.empty()) return paths[microbatch];
  std::vector<int> all(rank_of_stage.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  return all;
}

inline std::vector<StageEdge> edges_of(const Schedule& schedule) {
  if (schedule.paths.empty() && !schedule.edges.empty()) return schedule.edges;
  std::vector<StageEdge> edges;
  for (int stage = 0; schedule.paths.empty() && stage + 1 < schedule.stages(); ++stage) edges.push_back({stage, stage + 1});
  for (const auto& path : schedule.paths) {
    for (size_t i = 0; i + 1 < path.size(); ++i) {
      const StageEdge edge{path[i], path[i + 1]};
      if (std::ranges::find(edges, edge) == edges.end()) edges.push_back(edge);
    }
  }
  return edges;
}

inline std::string describe(const Schedule& schedule) {
  std::string lines;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    lines += "rank" + std::to_string(rank) + ":";
    for (const auto& action : schedule.ranks[rank]) {
      if (is_compute(action.kind)) lines += " " + text(action);
    }
    lines += "\n";
  }
  return lines;
}

namespace detail {

inline bool any_action(const Schedule& schedule, bool (*is)(Kind)) {
  for (const auto& list : schedule.ranks) {
    for (const auto& action : list) {
      if (is(action.kind)) return true;
    }
  }
  return false;
}

// `schedule` with what `change` makes of each action: one, or none.
template <class Change>
Schedule changed(const Schedule& schedule, Change change) {
  auto result = schedule;
  for (auto& list : result.ranks) {
    std::vector<Action> kept;
    for (const auto& action : list) {
      if (const std::optional<Action> one = change(action)) kept.push_back(*one);
    }
    list = std::move(kept);
  }
  return result;
}

}  // namespace detail

inline Schedule forward_only(const Schedule& schedule) {
  return detail::changed(schedule, [](const Action& action) -> std::optional<Action> {
    const auto kind = action.kind;
    if (kind == Kind::OVERLAP_F_B) return Action{action.stage, Kind::F, action.microbatch};
    const bool kept = kind == Kind::F || kind == Kind::SEND_F || kind == Kind::RECV_F || kind == Kind::UNSHARD || kind == Kind::RESHARD;
    return kept ? std::optional(action) : std::nullopt;
  });
}

inline Schedule compute_only(const Schedule& schedule) {
  return detail::changed(schedule, [](const Action& action) { return is_compute(action.kind) ? std::optional(action) : std::nullopt; });
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
