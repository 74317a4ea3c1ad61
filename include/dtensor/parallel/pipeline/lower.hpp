// From what ranks compute to what they also send, gather and reduce.
#pragma once

#include <dtensor/parallel/pipeline/check.hpp>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// The schedule with a send after each action whose result another rank needs, and the receive in that rank's list at the same time. Ends
// meet in one order of all ranks, so that no send or receive waits forever, even unbuffered. The order is PyTorch's. Throws for schedules
// that check() refuses.
Schedule with_messages(const Schedule& schedule);

// The schedule with UNSHARD and RESHARD: a rank gathers the parameters of the `stages` stages that it needs next, and frees the others.
Schedule with_gathering(const Schedule& schedule, int stages = 3);

// The schedule with REDUCE_GRAD after each stage's last backward.
Schedule with_reductions(const Schedule& schedule);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// Takes the ranks in turns, an action each. An action goes into its rank's list when what it needs is there, and its messages into both.
class Lowering {
 public:
  explicit Lowering(const Schedule& schedule)
      : schedule_(schedule), edges_(schedule), arrived_(edges_.list.size() * 2 * schedule.microbatches, 0), result_(schedule) {
    for (auto& list : result_.ranks) list.clear();
  }

  Schedule run() {
    std::vector<size_t> next(schedule_.ranks.size(), 0);
    for (bool any = true; std::exchange(any, false);) {
      for (size_t rank = 0; rank < next.size(); ++rank) {
        const auto& list = schedule_.ranks[rank];
        if (next[rank] == list.size() || !ready(list[next[rank]])) continue;
        add(static_cast<int>(rank), list[next[rank]++]);
        any = true;
      }
    }
    return std::move(result_);
  }

 private:
  static bool passes_on(Kind kind) { return kind == Kind::F || kind == Kind::I || kind == Kind::B; }
  char& arrived(int edge, const Action& part) {
    return arrived_[(static_cast<size_t>(edge) * 2 + (part.kind == Kind::F)) * schedule_.microbatches + part.microbatch];
  }

  bool ready(const Action& action) {
    return std::ranges::all_of(Parts(action), [&](const Action& part) {
      if (!passes_on(part.kind)) return true;
      const auto& needed = part.kind == Kind::F ? edges_.into(part.stage, part.microbatch) : edges_.out_of(part.stage, part.microbatch);
      return std::ranges::all_of(needed, [&](int edge) { return arrived(edge, part) != 0; });
    });
  }

  void add(int rank, const Action& action) {
    result_.ranks[rank].push_back(action);
    for (const auto& part : Parts(action)) {
      if (!passes_on(part.kind)) continue;
      const bool forward = part.kind == Kind::F;
      for (const int edge : forward ? edges_.out_of(part.stage, part.microbatch) : edges_.into(part.stage, part.microbatch)) {
        arrived(edge, part) = 1;
        if (edges_.crosses(edge)) add_message(rank, edge, part);
      }
    }
  }

  void add_message(int rank, int edge, const Action& part) {
    const bool forward = part.kind == Kind::F;
    const int other = forward ? edges_.list[edge].to : edges_.list[edge].from;
    Action send{part.stage, forward ? Kind::SEND_F : Kind::SEND_B, part.microbatch};
    if (next_stage(send) != other) send.other_stage = other;
    result_.ranks[rank].push_back(send);
    result_.ranks[schedule_.rank_of_stage[other]].push_back(counterpart(send));
  }

  const Schedule& schedule_;
  const Edges edges_;
  std::vector<char> arrived_;
  Schedule result_;
};

// The first `count` stages that a list needs from `begin` on.
inline std::vector<int> next_stages(const std::vector<Action>& list, size_t begin, int count) {
  std::vector<int> stages;
  for (size_t i = begin; i < list.size() && static_cast<int>(stages.size()) < count; ++i) {
    if (!is_compute(list[i].kind)) continue;
    for (const auto& part : Parts(list[i])) {
      if (std::ranges::find(stages, part.stage) == stages.end()) stages.push_back(part.stage);
    }
  }
  return stages;
}

inline std::vector<Action> with_gathering(const std::vector<Action>& list, int stages) {
  std::vector<Action> result;
  std::vector<int> gathered;
  const auto free_others = [&](const std::vector<int>& kept) {
    std::erase_if(gathered, [&](int stage) {
      const bool goes = std::ranges::find(kept, stage) == kept.end();
      if (goes) result.push_back({stage, Kind::RESHARD});
      return goes;
    });
  };
  for (size_t i = 0; i < list.size(); ++i) {
    if (is_compute(list[i].kind)) {
      const auto wanted = next_stages(list, i, stages);
      free_others(wanted);
      for (const int stage : wanted) {
        if (std::ranges::find(gathered, stage) != gathered.end()) continue;
        gathered.push_back(stage);
        result.push_back({stage, Kind::UNSHARD});
      }
    }
    result.push_back(list[i]);
  }
  free_others({});
  return result;
}

}  // namespace detail

inline Schedule with_messages(const Schedule& schedule) {
  if (detail::has_messages(schedule))
    detail::refuse({detail::name_of(schedule), " has messages already; expected none; hint: compute_only(schedule) takes them out"});
  check(schedule, detail::trains(schedule) ? Pass::training : Pass::forward);
  return detail::Lowering(schedule).run();
}

inline Schedule with_gathering(const Schedule& schedule, int stages) {
  if (stages < 1)
    detail::refuse(
        {"with_gathering got ", stages, " stages; expected one or more; hint: 3 are one forward, one backward and the next one"});
  auto result = schedule;
  for (int rank = 0; rank < static_cast<int>(result.ranks.size()); ++rank) {
    const auto own = std::ranges::count(schedule.rank_of_stage, rank);
    result.ranks[rank] = detail::with_gathering(result.ranks[rank], std::min(stages, static_cast<int>(own)));
  }
  return result;
}

inline Schedule with_reductions(const Schedule& schedule) {
  auto result = schedule;
  std::vector<int> left(schedule.stages(), 0);
  for (int microbatch = 0; microbatch < schedule.microbatches; ++microbatch) {
    for (const int stage : schedule.path(microbatch)) ++left[stage];
  }
  for (auto& list : result.ranks) {
    const auto before = std::exchange(list, {});
    for (const auto& action : before) {
      list.push_back(action);
      for (const auto& part : Parts(action)) {
        const bool ends = part.kind == Kind::B || part.kind == Kind::W;
        if (ends && --left[part.stage] == 0) list.push_back({part.stage, Kind::REDUCE_GRAD});
      }
    }
  }
  return result;
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
