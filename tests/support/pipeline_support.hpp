// Schedules to test, and what makes one legal, written in another way than the checker.
#pragma once

#include <dtensor/parallel/pipeline/schedules.hpp>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace dtensor::pipelining::test {

// Every schedule but `automatic` with these ranks and microbatches; where any number of chunks goes, with 1 to `most_chunks`.
inline std::vector<Schedule> every_schedule(int ranks, int microbatches, int most_chunks = 3) {
  std::vector<Schedule> schedules;
  for (const auto& named : named_schedules()) {
    if (named.name == "automatic") continue;
    if (named.chunks > 0) schedules.push_back(named.make({ranks, microbatches}));
    for (int chunks = 1; named.chunks == 0 && chunks <= most_chunks; ++chunks)
      schedules.push_back(named.make({ranks, microbatches, chunks}));
  }
  return schedules;
}

inline std::string what_of(const Schedule& schedule) {
  return fmt::format("{} on {} ranks, {} stages, {} microbatches", schedule.name, schedule.ranks.size(), schedule.stages(),
                     schedule.microbatches);
}

// Calls f(changed, names) for the schedule with each single action removed, doubled (beside itself and at the end of its list), and each
// two swapped, as who writes a file by hand may do. `names` are the texts of the actions that a change touches.
template <class F>
void for_each_fault(const Schedule& schedule, F f) {
  std::vector<std::pair<int, int>> places;  // rank and position
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    for (int i = 0; i < static_cast<int>(schedule.ranks[rank].size()); ++i) places.emplace_back(rank, i);
  }
  const auto names_of = [&](const std::pair<int, int>& place) {
    std::vector<std::string> names;
    for (const auto& part : Parts(schedule.ranks[place.first][place.second])) names.push_back(text(part));
    return names;
  };
  for (size_t one = 0; one < places.size(); ++one) {
    const auto [rank, i] = places[one];
    const auto names = names_of(places[one]);
    auto changed = schedule;
    auto& list = changed.ranks[rank];
    list.erase(list.begin() + i);
    f(changed, names);
    for (const int where : {i, static_cast<int>(schedule.ranks[rank].size())}) {
      list = schedule.ranks[rank];
      list.insert(list.begin() + where, schedule.ranks[rank][i]);
      f(changed, names);
    }
    for (size_t two = one + 1; two < places.size(); ++two) {
      const auto [other, j] = places[two];
      changed = schedule;
      std::swap(changed.ranks[rank][i], changed.ranks[other][j]);
      auto either = names;
      for (const auto& name : names_of(places[two])) either.push_back(name);
      f(changed, either);
    }
  }
}

// Whether the lists of a schedule, whose stages each feed the next, are a whole step that comes to its end: by trying.
class Oracle {
 public:
  explicit Oracle(const Schedule& schedule) : schedule_(schedule), stages_(schedule.stages()), messages_(detail::has_messages(schedule)) {}

  bool legal() { return own_ranks() && once() && in_order() && ends(); }

 private:
  // The compute actions of a list by their texts, pairs taken apart.
  static std::vector<std::string> parts(const Action& action) {
    std::vector<std::string> texts;
    for (const auto& part : Parts(action)) texts.push_back(text(part));
    return texts;
  }

  bool own_ranks() {
    for (int rank = 0; rank < static_cast<int>(schedule_.ranks.size()); ++rank) {
      int position = 0;
      for (const auto& action : schedule_.ranks[rank]) {
        for (const auto& part : Parts(action)) {
          if (schedule_.rank_of_stage.at(part.stage) != rank) return false;
          if (!position_.emplace(text(part), position).second) return false;
        }
        ++position;
      }
    }
    return true;
  }

  bool has(int stage, const char* kind, int microbatch) const { return position_.contains(fmt::format("{}{}{}", stage, kind, microbatch)); }
  int at(int stage, const char* kind, int microbatch) const { return position_.at(fmt::format("{}{}{}", stage, kind, microbatch)); }
  bool next_elsewhere(int stage) const {
    return stage + 1 < stages_ && schedule_.rank_of_stage[stage] != schedule_.rank_of_stage[stage + 1];
  }

  bool once() const {
    size_t count = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      for (int i = 0; i < schedule_.microbatches; ++i) {
        const bool whole = has(stage, "B", i), first = has(stage, "I", i), second = has(stage, "W", i);
        if (!has(stage, "F", i) || first != second || whole == first) return false;
        count += whole ? 2 : 3;
        if (!messages_ || !next_elsewhere(stage)) continue;
        if (!has(stage, "SEND_F", i) || !has(stage + 1, "RECV_F", i) || !has(stage + 1, "SEND_B", i) || !has(stage, "RECV_B", i))
          return false;
        count += 4;
      }
    }
    return count == position_.size();  // nothing else
  }

  bool in_order() const {
    for (int stage = 0; stage < stages_; ++stage) {
      for (int i = 0; i < schedule_.microbatches; ++i) {
        const char* backward = has(stage, "B", i) ? "B" : "I";
        if (at(stage, backward, i) <= at(stage, "F", i)) return false;
        if (*backward == 'I' && at(stage, "W", i) < at(stage, "I", i)) return false;
        if (!messages_ || !next_elsewhere(stage)) continue;
        const char* later = has(stage + 1, "B", i) ? "B" : "I";
        if (at(stage, "SEND_F", i) < at(stage, "F", i) || at(stage + 1, "RECV_F", i) > at(stage + 1, "F", i)) return false;
        if (at(stage + 1, "SEND_B", i) < at(stage + 1, later, i) || at(stage, "RECV_B", i) > at(stage, backward, i)) return false;
      }
    }
    return true;
  }

  bool can_run(const Action& part) const {
    if (part.kind == Kind::F) return part.stage == 0 || done_.contains(fmt::format("{}F{}", part.stage - 1, part.microbatch));
    if (part.kind == Kind::W || part.stage + 1 == stages_) return true;
    return done_.contains(fmt::format("{}B{}", part.stage + 1, part.microbatch)) ||
           done_.contains(fmt::format("{}I{}", part.stage + 1, part.microbatch));
  }

  // A send and its receive run together, when both are next.
  bool ends() {
    std::vector<size_t> next(schedule_.ranks.size(), 0);
    const auto head = [&](size_t rank) { return next[rank] < schedule_.ranks[rank].size() ? text(schedule_.ranks[rank][next[rank]]) : ""; };
    for (bool any = true; std::exchange(any, false);) {
      for (size_t rank = 0; rank < next.size(); ++rank) {
        if (head(rank).empty()) continue;
        const auto& action = schedule_.ranks[rank][next[rank]];
        if (is_send(action.kind)) {
          const bool forward = action.kind == Kind::SEND_F;
          const int other = action.stage + (forward ? 1 : -1);
          const auto peer = static_cast<size_t>(schedule_.rank_of_stage[other]);
          if (head(peer) != fmt::format("{}RECV_{}{}", other, forward ? "F" : "B", action.microbatch)) continue;
          ++next[peer], ++next[rank], any = true;
        } else if (is_compute(action.kind) && std::ranges::all_of(Parts(action), [&](const Action& part) { return can_run(part); })) {
          for (const auto& part : parts(action)) done_.insert(part);
          ++next[rank], any = true;
        }
      }
    }
    for (size_t rank = 0; rank < next.size(); ++rank) {
      if (!head(rank).empty()) return false;
    }
    return true;
  }

  const Schedule& schedule_;
  const int stages_;
  const bool messages_;
  std::map<std::string, int> position_;
  std::set<std::string> done_;
};

}  // namespace dtensor::pipelining::test
