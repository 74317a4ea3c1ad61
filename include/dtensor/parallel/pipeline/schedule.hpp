// A pipeline's schedule as data: which rank has which stages, and what it does in which order. Any function may make one.
#pragma once

#include <dtensor/parallel/pipeline/action.hpp>

#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Stage `from` feeds stage `to`.
struct StageEdge {
  int from = 0, to = 0;
};

struct Schedule {
  std::string name;
  int microbatches = 0;
  std::vector<int> rank_of_stage;          // of each stage, in the model's order
  std::vector<std::vector<Action>> ranks;  // what each rank does, in this order
  std::vector<StageEdge> edges{};          // which stage feeds which later ones; none: each stage feeds the next one

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
};

// What a generator is asked for. Without a number of chunks (stages of a rank), the schedule has the usual one.
struct PipelineSize {
  int ranks = 1, microbatches = 1, chunks = 0;
};

// Stage s is on rank s mod `ranks`.
std::vector<int> loop_placement(int ranks, int chunks);
// Ranks 0, 1, ..., then back again: the last stage of two chunks is on rank 0, beside the first.
std::vector<int> v_placement(int ranks, int chunks = 2);

// The stages that feed each stage, and that each stage feeds, by `edges` or its default.
struct Neighbours {
  explicit Neighbours(const Schedule& schedule);
  std::vector<std::vector<int>> before, after;
};

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

inline Neighbours::Neighbours(const Schedule& schedule) : before(schedule.stages()), after(schedule.stages()) {
  for (const auto& [from, to] : schedule.edges) {
    before[to].push_back(from);
    after[from].push_back(to);
  }
  for (int stage = 0; schedule.edges.empty() && stage + 1 < schedule.stages(); ++stage) {
    before[stage + 1].push_back(stage);
    after[stage].push_back(stage + 1);
  }
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
