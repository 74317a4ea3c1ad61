// Where in its rank's list a schedule has each action, and the errors of the checker.
#pragma once

#include <dtensor/parallel/pipeline/grid.hpp>

#include <utility>

#pragma GCC visibility push(default)

namespace dtensor::pipelining::detail {

std::string name_of(const Schedule& schedule);

// Throws the error of an action that is there.
[[noreturn]] inline void refuse(const Schedule& schedule, const Place& place, Words why) {
  const auto& action = schedule.ranks[place.rank][place.position];
  refuse({name_of(schedule), ": rank ", place.rank, ", action ", place.position, ", ", text(action), ": ", joined(why), "\n",
          grid_around(schedule, {place})});
}

// Throws the error of an action that is missing; shows what stands around `place`.
[[noreturn]] inline void lacks(const Schedule& schedule, const Action& action, const Place& place, Words why) {
  refuse(
      {name_of(schedule), ": rank ", place.rank, ", ", text(action), " is missing: ", joined(why), "\n", grid_around(schedule, {place})});
}

// Where an action stands in its stage's rank; at the beginning, if nowhere.
Place place_of(const Schedule& schedule, const Action& action);

// Of each stage and microbatch. Refuses what comes twice.
class Positions {
 public:
  struct At {
    int forward = -1, backward = -1, weight = -1;  // -1: nowhere
    bool split = false;                            // the backward is I
  };

  // Expects stages and microbatches that exist.
  explicit Positions(const Schedule& schedule);
  const At& at(int stage, int microbatch) const { return table_[static_cast<size_t>(stage) * microbatches_ + microbatch]; }

 private:
  void read(const Schedule& schedule, const Place& place, const Action& part);

  int microbatches_;
  std::vector<At> table_;
};

bool in_forward(Kind kind);
// Whether there is any backward.
bool trains(const Schedule& schedule);

// -- How -----------------------------------------------------------------------------------------------------------------

inline std::string name_of(const Schedule& schedule) { return schedule.name.empty() ? "schedule" : schedule.name; }

inline bool in_forward(Kind kind) {
  return kind == Kind::F || kind == Kind::SEND_F || kind == Kind::RECV_F || kind == Kind::UNSHARD || kind == Kind::RESHARD;
}

inline bool trains(const Schedule& schedule) {
  return std::ranges::any_of(schedule.ranks, [](const auto& list) {
    return std::ranges::any_of(list, [](const Action& action) { return !in_forward(action.kind); });
  });
}

inline Place place_of(const Schedule& schedule, const Action& action) {
  const int rank = schedule.rank_of_stage[action.stage];
  const auto& list = schedule.ranks[rank];
  const auto has = [&](const Action& other) {
    return std::ranges::any_of(Parts(other), [&](const Action& part) { return part == action; });
  };
  const auto found = std::ranges::find_if(list, has);
  return {rank, found == list.end() ? 0 : static_cast<int>(found - list.begin())};
}

inline Positions::Positions(const Schedule& schedule)
    : microbatches_(schedule.microbatches), table_(static_cast<size_t>(schedule.stages()) * schedule.microbatches) {
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    const auto& list = schedule.ranks[rank];
    for (int i = 0; i < static_cast<int>(list.size()); ++i) {
      if (!is_compute(list[i].kind)) continue;
      for (const auto& part : Parts(list[i])) read(schedule, {rank, i}, part);
    }
  }
}

inline void Positions::read(const Schedule& schedule, const Place& place, const Action& part) {
  auto& at = table_[static_cast<size_t>(part.stage) * microbatches_ + part.microbatch];
  const bool backward = part.kind == Kind::B || part.kind == Kind::I;
  int& position = part.kind == Kind::F ? at.forward : backward ? at.backward : at.weight;
  if (position >= 0 && backward && at.split != (part.kind == Kind::I)) {
    refuse(schedule, place, {"the backward began in action ", position, "; expected B, or I and W; hint: leave one out"});
  }
  if (position >= 0) {
    refuse(schedule, place, {"it comes twice, first as action ", position, "; expected once; hint: leave one out, or another is meant"});
  }
  position = place.position;
  at.split = at.split || part.kind == Kind::I;
  if (at.weight >= 0 && at.backward >= 0 && !at.split) {
    refuse(schedule, place,
           {"the backward is whole in B, action ", at.backward, "; expected B, or I and W; hint: leave W out, or write I for B"});
  }
}

}  // namespace dtensor::pipelining::detail

#pragma GCC visibility pop
