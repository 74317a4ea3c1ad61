// Two ranks between which microbatches go back and forth, layer after layer: attention on one, experts on the other (Zhu et al.,
// "MegaScale-Infer", 2025; "DisagMoE", 2026). While one rank computes a microbatch, the other one computes another.
#pragma once

#include <dtensor/parallel/pipeline/generators.hpp>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// The schedule of a model of so many layers, in 2 layers + 1 stages: the even ones on rank 0 and the odd ones on rank 1. All microbatches
// pass a stage before any passes the rank's next one, and backwards go the other way, so gradients are summed as on one device. A rank
// holds the activations of all microbatches: cut a batch for which that is too much into several steps. Throws for sizes below 1.
Schedule ping_pong(int layers, int microbatches);

// What a microbatch takes, in any unit: a stage of rank 0, one of rank 1, and from when a message is sent until it can be used.
struct PingPongTimes {
  double first = 1, second = 1, message = 0;
};

// Whether so many microbatches hide messages and the other rank's time: then the busier rank never waits for one that is on its way. Its
// time for all of them is at least one microbatch's way there and back (MegaScale-Infer, eq. 1 to 3): m max(T, U) >= T + U + 2 C.
bool is_hidden(int microbatches, const PingPongTimes& times);
// How many microbatches that takes.
int microbatches_to_hide(const PingPongTimes& times);

// The makespan of the forwards: exactly what simulate() gives where all stages of a rank take the same. With T, U and C as above, S = T + U
// + 2 C and M = max(T, U), the longest way through m microbatches and L layers is the longer of (L+1) m T (rank 0 is never idle) and
//   T + S + (L m - 1) M            where the time is hidden, and else
//   T + L S + (m - 1) M.
// Backwards, with their own times, come after the last forward, and take what the formula gives for them.
double ping_pong_makespan(int layers, int microbatches, const PingPongTimes& forward);

// -- How -----------------------------------------------------------------------------------------------------------------

inline Schedule ping_pong(int layers, int microbatches) {
  if (layers < 1 || microbatches < 1 || layers >= detail::kTooMany / 2 || microbatches >= detail::kTooMany)
    detail::refuse({"ping_pong got ", layers, " layers and ", microbatches, " microbatches; expected one or more, and fewer than ",
                    detail::kTooMany / 2, "; hint: a layer is attention and its experts"});
  Schedule schedule{"ping_pong", microbatches, loop_placement(2, layers + 1), std::vector<std::vector<Action>>(2)};
  schedule.rank_of_stage.pop_back();
  for (int rank = 0; rank < 2; ++rank) {
    const auto stages = detail::stages_of(schedule, rank);
    const auto forwards = detail::in_rounds({microbatches}, stages);
    const auto backwards = detail::in_rounds({microbatches}, detail::reversed(stages));
    schedule.ranks[rank] = detail::in_turns(forwards, backwards, {static_cast<int>(forwards.size())});
  }
  return schedule;
}

namespace detail {

inline double there_and_back(const PingPongTimes& times) { return times.first + times.second + 2 * times.message; }

}  // namespace detail

inline bool is_hidden(int microbatches, const PingPongTimes& times) {
  return microbatches * std::max(times.first, times.second) >= detail::there_and_back(times);
}

inline int microbatches_to_hide(const PingPongTimes& times) {
  int count = 1;
  while (!is_hidden(count, times) && count < detail::kTooMany) ++count;
  return count;
}

inline double ping_pong_makespan(int layers, int microbatches, const PingPongTimes& times) {
  const double l = layers, m = microbatches, most = std::max(times.first, times.second), way = detail::there_and_back(times);
  const double hops = is_hidden(microbatches, times) ? way + (l * m - 1) * most : l * way + (m - 1) * most;
  return std::max((l + 1) * m * times.first, times.first + hops);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
