// The parts of check() that concern messages, gathered parameters and waiting.
#pragma once

#include <dtensor/parallel/pipeline/positions.hpp>
#include <dtensor/parallel/pipeline/progress.hpp>

#pragma GCC visibility push(default)

namespace dtensor::pipelining::detail {

// That what goes along each edge between two ranks is sent once, after it is made, and received once, before it is used.
void check_messages(const Schedule& schedule, const Positions& positions, bool training);

// That a stage is gathered where it computes, and reduced after its last backward, if the schedule gathers and reduces at all.
void check_gathering(const Schedule& schedule);

// That all lists come to their end.
void check_progress(const Schedule& schedule);

// -- How -----------------------------------------------------------------------------------------------------------------

class Messages {
 public:
  Messages(const Schedule& schedule, const Positions& positions)
      : schedule_(schedule), positions_(positions), edges_(schedule), ends_(edges_.list.size() * 2 * schedule.microbatches) {}

  void read() {
    for (int rank = 0; rank < static_cast<int>(schedule_.ranks.size()); ++rank) {
      const auto& list = schedule_.ranks[rank];
      for (int i = 0; i < static_cast<int>(list.size()); ++i) {
        if (is_message(list[i].kind)) read({rank, i}, list[i]);
      }
    }
  }

  void check(bool training) const {
    for (int edge = 0; edge < static_cast<int>(edges_.list.size()); ++edge) {
      if (!edges_.crosses(edge)) continue;
      for (int microbatch = 0; microbatch < schedule_.microbatches; ++microbatch) {
        if (!goes_along(edge, microbatch)) continue;
        check(edge, true, microbatch);
        if (training) check(edge, false, microbatch);
      }
    }
  }

 private:
  struct Ends {
    int send = -1, receive = -1;  // positions; -1: nowhere
  };

  size_t key(int edge, bool forward, int microbatch) const {
    return (static_cast<size_t>(edge) * 2 + forward) * schedule_.microbatches + microbatch;
  }

  bool goes_along(int edge, int microbatch) const {
    return std::ranges::count(edges_.out_of(edges_.list[edge].from, microbatch), edge) > 0;
  }

  void read(const Place& place, const Action& action) {
    const int edge = edge_of(edges_, action), other = other_end(action);
    if (edge < 0 || !goes_along(edge, action.microbatch)) {
      refuse(schedule_, place,
             {"no edge joins stages ", action.stage, " and ", other,
              "; expected a stage that feeds the other; hint: see Schedule::edges and paths"});
    }
    if (!edges_.crosses(edge)) {
      refuse(schedule_, place,
             {"stages ", action.stage, " and ", other, " are both on rank ", place.rank,
              "; expected no message; hint: they hand over without one"});
    }
    auto& ends = ends_[key(edge, action.kind == Kind::SEND_F || action.kind == Kind::RECV_F, action.microbatch)];
    int& position = is_send(action.kind) ? ends.send : ends.receive;
    if (position >= 0) {
      refuse(schedule_, place, {"it comes twice, first as action ", position, "; expected once; hint: leave one out, or another is meant"});
    }
    position = place.position;
  }

  void check(int edge, bool forward, int microbatch) const {
    const auto [send, receive] = ends_[key(edge, forward, microbatch)];
    const auto& [first, second] = edges_.list[edge];
    const int from = forward ? first : second, to = forward ? second : first;
    Action sends{from, forward ? Kind::SEND_F : Kind::SEND_B, microbatch};
    if (next_stage(sends) != to) sends.other_stage = to;
    const auto receives = counterpart(sends);
    const auto& made = positions_.at(from, microbatch);
    const auto& used = positions_.at(to, microbatch);
    const Place maker{schedule_.rank_of_stage[from], forward ? made.forward : made.backward};
    const Place user{schedule_.rank_of_stage[to], forward ? used.forward : used.backward};
    const auto what = forward ? "output" : "gradient";
    if (send < 0)
      lacks(schedule_, sends, maker, {"rank ", user.rank, " needs this ", what, "; expected each message once; hint: see with_messages"});
    if (receive < 0)
      lacks(schedule_, receives, user,
            {"rank ", maker.rank, " sends this ", what, "; expected each message once; hint: see with_messages"});
    if (send < maker.position) {
      refuse(schedule_, {maker.rank, send},
             {"the ", what, " is made later, by ", text(schedule_.ranks[maker.rank][maker.position]), ", action ", maker.position,
              "; expected it before; hint: see with_messages"});
    }
    if (receive > user.position) {
      refuse(schedule_, {user.rank, receive},
             {"the ", what, " is needed earlier, by ", text(schedule_.ranks[user.rank][user.position]), ", action ", user.position,
              "; expected the message before; hint: see with_messages"});
    }
  }

  const Schedule& schedule_;
  const Positions& positions_;
  const Edges edges_;
  std::vector<Ends> ends_;
};

inline void check_messages(const Schedule& schedule, const Positions& positions, bool training) {
  if (!has_messages(schedule)) return;
  Messages messages(schedule, positions);
  messages.read();
  messages.check(training);
}

// Follows which stages of a rank are gathered: since which action, -1: not.
inline void check_gathered(const Schedule& schedule, int rank, std::vector<int>& since) {
  const auto& list = schedule.ranks[rank];
  for (int i = 0; i < static_cast<int>(list.size()); ++i) {
    for (const auto& part : Parts(list[i])) {
      int& gathered = since[part.stage];
      if (part.kind == Kind::UNSHARD && gathered >= 0) {
        refuse(schedule, {rank, i}, {"it is gathered since action ", gathered, "; expected RESHARD between; hint: leave one out"});
      }
      if ((is_compute(part.kind) || part.kind == Kind::RESHARD) && gathered < 0) {
        refuse(schedule, {rank, i},
               {"stage ", part.stage, "'s parameters are not gathered; expected ", part.stage, "UNSHARD before; hint: see with_gathering"});
      }
      if (part.kind == Kind::UNSHARD) gathered = i;
      if (part.kind == Kind::RESHARD) gathered = -1;
    }
  }
}

inline void check_reduced(const Schedule& schedule, int stage) {
  const int rank = schedule.rank_of_stage[stage];
  const auto& list = schedule.ranks[rank];
  int reduced = -1, last = -1;
  for (int i = 0; i < static_cast<int>(list.size()); ++i) {
    for (const auto& part : Parts(list[i])) {
      if (part.stage != stage) continue;
      if (part.kind == Kind::B || part.kind == Kind::W) last = i;
      if (part.kind != Kind::REDUCE_GRAD) continue;
      if (reduced >= 0) {
        refuse(schedule, {rank, i},
               {"it comes twice, first as action ", reduced, "; expected once, after the last backward; hint: leave one out"});
      }
      reduced = i;
    }
  }
  if (reduced < 0 && last >= 0) {
    lacks(schedule, {stage, Kind::REDUCE_GRAD}, {rank, last},
          {"other stages reduce their gradients; expected it of all; hint: see with_reductions"});
  }
  if (reduced < last) {
    refuse(schedule, {rank, reduced},
           {"the stage's last backward is ", text(list[last]), ", action ", last,
            "; expected it before; hint: gradients are reduced once, when all are there"});
  }
}

inline void check_gathering(const Schedule& schedule) {
  if (any_action(schedule, [](Kind kind) { return kind == Kind::UNSHARD || kind == Kind::RESHARD; })) {
    std::vector<int> since(schedule.stages(), -1);
    for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) check_gathered(schedule, rank, since);
    for (int stage = 0; stage < schedule.stages(); ++stage) {
      if (since[stage] < 0) continue;
      refuse(schedule, {schedule.rank_of_stage[stage], since[stage]},
             {"nothing frees it; expected ", stage, "RESHARD after its last use; hint: see with_gathering"});
    }
  }
  if (any_action(schedule, [](Kind kind) { return kind == Kind::REDUCE_GRAD; })) {
    for (int stage = 0; stage < schedule.stages(); ++stage) check_reduced(schedule, stage);
  }
}

// Throws the error of ranks that wait for each other, the first circle of them.
[[noreturn]] inline void tell_circle(const Schedule& schedule, const Progress& progress) {
  const int ranks = static_cast<int>(schedule.ranks.size());
  int rank = 0;
  while (progress.position(rank) >= static_cast<int>(schedule.ranks[rank].size())) ++rank;
  for (int i = 0; i < ranks; ++i) rank = progress.waits_for(rank).rank;  // by now within a circle
  std::vector<Place> places;
  std::string waits;
  for (const int first = rank; places.empty() || rank != first;) {
    places.push_back({rank, progress.position(rank)});
    const auto& action = schedule.ranks[rank][progress.position(rank)];
    const auto [needed, peer] = progress.waits_for(rank);
    waits += joined(
        {waits.empty() ? "" : "; ", "rank ", rank, ", action ", progress.position(rank), ", ", text(action), " waits for ", text(needed)});
    waits += peer == rank ? std::string(", which comes later") : joined({" of rank ", peer});
    rank = peer;
  }
  detail::refuse({name_of(schedule), ": ", places.size() == 1 ? "a rank waits for itself" : "ranks wait for each other", ": ", waits,
                  "; expected an order in which all come to their end; hint: ",
                  has_messages(schedule) ? "with_messages(compute_only(schedule)) orders the messages of the same lists"
                                         : "a stage computes after the one that feeds it, and backwards the other way round",
                  "\n", grid_around(schedule, places)});
}

inline void check_progress(const Schedule& schedule) {
  Progress progress(schedule, {.unbuffered = true});
  if (!progress.run([](const Action&) { return 0.0; }, [](int, int, double, double) {})) tell_circle(schedule, progress);
}

}  // namespace dtensor::pipelining::detail

#pragma GCC visibility pop
