// The proof that a schedule is complete and comes to its end.
#pragma once

#include <dtensor/parallel/pipeline/check_messages.hpp>
#include <dtensor/parallel/pipeline/positions.hpp>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

enum class Pass { training, forward };

// Throws unless
//   - each stage is on one rank and runs the forward of each microbatch that passes it once and, in training, its backward once: B, or I
//     and W;
//   - a rank runs F before B and I, and I before W;
//   - no rank waits forever. Messages in the lists are complete, and their ends meet in an order in which no rank waits forever even if
//     each send and receive blocks it until the other end is there. Without messages, with_messages() finds such an order;
//   - with UNSHARD or REDUCE_GRAD in the lists, a stage is gathered where it computes and freed at the end, and reduced once, after its
//     last backward.
// The error names rank, action and reason, and shows what stands around.
void check(const Schedule& schedule, Pass pass = Pass::training);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline void check_paths(const Schedule& schedule) {
  const auto count = static_cast<int>(schedule.paths.size());
  if (count == 0) return;
  if (count != schedule.microbatches || !schedule.edges.empty())
    refuse({name_of(schedule), " has ", count, " paths of ", schedule.microbatches, " microbatches and ",
            static_cast<int>(schedule.edges.size()), " edges; expected a path for each microbatch, and no edges"});
  for (int microbatch = 0; microbatch < count; ++microbatch) {
    const auto& path = schedule.paths[microbatch];
    for (const int stage : path) {
      if (stage < 0 || stage >= schedule.stages() || std::ranges::count(path, stage) > 1)
        refuse({name_of(schedule), ": the path of microbatch ", microbatch, " passes stage ", stage, "; expected each of ",
                schedule.stages(), " stages once at most"});
    }
    if (path.empty()) refuse({name_of(schedule), ": microbatch ", microbatch, " passes no stage; expected a path of one or more"});
  }
}

inline void check_sizes(const Schedule& schedule) {
  const int ranks = static_cast<int>(schedule.ranks.size()), stages = schedule.stages();
  if (ranks == 0 || stages == 0 || schedule.microbatches <= 0)
    refuse({name_of(schedule), " has ", ranks, " ranks, ", stages, " stages and ", schedule.microbatches,
            " microbatches; expected one or more of each; hint: Schedule::ranks, rank_of_stage and microbatches"});
  for (int stage = 0; stage < stages; ++stage) {
    const int rank = schedule.rank_of_stage[stage];
    if (rank < 0 || rank >= ranks)
      refuse({name_of(schedule), ": stage ", stage, " of ", stages, " is on ", rank < 0 ? "no rank" : "rank " + std::to_string(rank),
              "; expected one of ranks 0 to ", ranks - 1, "; hint: ", rank < 0 ? "no action names it" : "see Schedule::rank_of_stage"});
  }
  check_paths(schedule);
  for (const auto& [from, to] : schedule.edges) {
    if (from < 0 || from >= to || to >= stages)
      refuse({name_of(schedule), ": stage ", from, " feeds stage ", to, "; expected a later one of ", stages,
              " stages; hint: stages are numbered in the model's order"});
  }
}

inline std::string first_of(const Schedule& schedule, int rank, int stage) {
  for (const auto& action : schedule.ranks[rank]) {
    for (const auto& part : Parts(action)) {
      if (part.stage == stage) return text(action);
    }
  }
  return "nothing of it";
}

// That an action is of its rank, of a microbatch that there is, and of this pass.
inline void check_action(const Schedule& schedule, const Place& place, const Action& action, Pass pass) {
  for (const auto& part : Parts(action)) {
    if (part.stage < 0 || part.stage >= schedule.stages()) {
      refuse(schedule, place,
             {"there is no stage ", part.stage, "; expected 0 to ", schedule.stages() - 1, "; hint: see Schedule::rank_of_stage"});
    }
    const int owner = schedule.rank_of_stage[part.stage];
    if (owner != place.rank) {
      refuse(schedule, place,
             {"stage ", part.stage, " is on rank ", owner, ", which has ", first_of(schedule, owner, part.stage),
              "; expected it there; hint: all that a stage does is in one rank's list"});
    }
    if (of_microbatch(part.kind) && (part.microbatch < 0 || part.microbatch >= schedule.microbatches)) {
      refuse(schedule, place,
             {"there is no microbatch ", part.microbatch, "; expected 0 to ", schedule.microbatches - 1,
              "; hint: see Schedule::microbatches"});
    }
    if (of_microbatch(part.kind) && !schedule.passes(part.stage, part.microbatch)) {
      refuse(schedule, place, {"microbatch ", part.microbatch, " does not pass stage ", part.stage, "; hint: see Schedule::paths"});
    }
    if (pass == Pass::forward && !in_forward(part.kind)) {
      refuse(schedule, place,
             {"a forward pass has none of these; expected F and its messages; hint: forward_only(schedule) is the schedule of one"});
    }
  }
}

// Names a forward that is missing where there are too few, so that no table is made for microbatches that a single wrong number invents.
inline void check_count(const Schedule& schedule) {
  std::vector<std::pair<int, int>> forwards;
  for (const auto& list : schedule.ranks) {
    for (const auto& action : list) {
      if (action.kind == Kind::F || action.kind == Kind::OVERLAP_F_B) forwards.emplace_back(action.stage, action.microbatch);
    }
  }
  size_t expected = 0;
  for (int microbatch = 0; microbatch < schedule.microbatches && expected <= forwards.size(); ++microbatch)
    expected += schedule.paths.empty() ? schedule.stages() : schedule.paths[microbatch].size();
  if (forwards.size() >= expected) return;
  std::ranges::sort(forwards);
  int stage = 0, microbatch = 0;
  while (!schedule.passes(stage, microbatch) || std::ranges::binary_search(forwards, std::pair(stage, microbatch))) {
    if (++microbatch == schedule.microbatches) ++stage, microbatch = 0;
  }
  lacks(schedule, {stage, Kind::F, microbatch}, place_of(schedule, {stage, Kind::F, microbatch - 1}),
        {"stage ", stage, " never runs microbatch ", microbatch, "; expected ", schedule.microbatches, " microbatches in each of ",
         schedule.stages(), " stages; hint: each stage runs each microbatch once"});
}

inline void check_complete(const Schedule& schedule, const Positions& positions, int stage, int microbatch) {
  const auto& at = positions.at(stage, microbatch);
  const int rank = schedule.rank_of_stage[stage];
  if (!schedule.passes(stage, microbatch)) return;
  if (at.backward < 0) {
    const auto what = at.weight < 0 ? Action{stage, Kind::B, microbatch} : Action{stage, Kind::I, microbatch};
    lacks(schedule, what, {rank, at.weight < 0 ? at.forward : at.weight},
          {"microbatch ", microbatch, " has ", at.weight < 0 ? "no backward" : "W without I", " in stage ", stage,
           "; expected B, or I and W; hint: forward_only(schedule) is for evaluation"});
  }
  if (at.split && at.weight < 0) {
    lacks(schedule, {stage, Kind::W, microbatch}, {rank, at.backward},
          {"I is half of a backward; expected its W; hint: B is both halves at once"});
  }
  if (at.backward <= at.forward) {
    refuse(schedule, {rank, at.backward},
           {"it comes before ", text(Action{stage, Kind::F, microbatch}), ", action ", at.forward, "; expected F before ",
            at.split ? "I" : "B", "; hint: a backward needs what its F keeps"});
  }
  if (at.split && at.weight < at.backward) {
    refuse(schedule, {rank, at.weight},
           {"it comes before ", text(Action{stage, Kind::I, microbatch}), ", action ", at.backward,
            "; expected I before W; hint: W needs what I leaves"});
  }
}

}  // namespace detail

inline void check(const Schedule& schedule, Pass pass) {
  detail::check_sizes(schedule);
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    const auto& list = schedule.ranks[rank];
    for (int i = 0; i < static_cast<int>(list.size()); ++i) detail::check_action(schedule, {rank, i}, list[i], pass);
  }
  detail::check_count(schedule);
  const detail::Positions positions(schedule);
  for (int stage = 0; stage < schedule.stages() && pass == Pass::training; ++stage) {
    for (int microbatch = 0; microbatch < schedule.microbatches; ++microbatch)
      detail::check_complete(schedule, positions, stage, microbatch);
  }
  detail::check_messages(schedule, positions, pass == Pass::training);
  detail::check_gathering(schedule);
  detail::check_progress(schedule);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
