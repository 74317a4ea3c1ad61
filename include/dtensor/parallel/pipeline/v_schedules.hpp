// Schedules whose stages lie in a V: two stages a rank, the last one beside the first, so that what rank 0 sends away comes back to it.
#pragma once

#include <dtensor/parallel/pipeline/generators.hpp>
#include <dtensor/parallel/pipeline/plan.hpp>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// No bubble between a rank's first and last action where F = I = W, with 1F1B's memory (Qi et al., "Zero Bubble Pipeline Parallelism",
// 2023, section 6).
Schedule zbv(const PipelineSize& sizes);

// About half of 1F1B's memory, and half of its bubble where F = I = W (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).
Schedule v_half(const PipelineSize& sizes);

// About a third of 1F1B's memory and two thirds of its bubble where F = I = W. Where they differ much, the bubble grows with the
// microbatches (the same paper).
Schedule v_min(const PipelineSize& sizes);

// Forward and backward of two stages overlap in pairs, so that the communication of experts hides behind computation (DeepSeek-AI,
// "DualPipe", 2024, cut in half by Sea AI Lab).
Schedule dualpipev(const PipelineSize& sizes);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// Writes the list of a rank with two stages, chunk 0 and 1, each microbatch after the one before.
class VList {
 public:
  VList(int ranks, int rank) : stage_{rank, 2 * ranks - 1 - rank} {}

  void forward(int chunk) { list_.push_back({stage_[chunk], Kind::F, forwards_[chunk]++}); }
  void backward(int chunk) { list_.push_back({stage_[chunk], Kind::B, backwards_[chunk]++}); }
  void pair(int forward, int backward) {
    list_.push_back(overlapped(stage_[forward], forwards_[forward], stage_[backward], backwards_[backward]));
    ++forwards_[forward], ++backwards_[backward];
  }
  void input(int chunk) {
    waiting_.push_back({stage_[chunk], Kind::W, backwards_[chunk]});
    list_.push_back({stage_[chunk], Kind::I, backwards_[chunk]++});
  }
  // The W that waits longest, of a chunk or of all; false if none waits.
  bool weight(int chunk) {
    return take([&](const Action& action) { return action.stage == stage_[chunk]; });
  }
  bool weight() {
    return take([](const Action&) { return true; });
  }
  int forwards(int chunk) const { return forwards_[chunk]; }
  std::vector<Action> list() && { return std::move(list_); }

 private:
  template <class Fits>
  bool take(Fits fits) {
    for (auto waits = waiting_.begin(); waits != waiting_.end(); ++waits) {
      if (!fits(*waits)) continue;
      list_.push_back(*waits);
      waiting_.erase(waits);
      return true;
    }
    return false;
  }

  int stage_[2], forwards_[2] = {0, 0}, backwards_[2] = {0, 0};
  std::vector<Action> list_, waiting_;
};

// What is left of an action without the microbatches from `microbatches` on.
inline std::optional<Action> up_to(const Action& action, int microbatches) {
  std::optional<Action> kept;
  int count = 0;
  for (const auto& part : Parts(action)) {
    if (part.microbatch < microbatches) kept = part, ++count;
  }
  return count == 2 ? action : kept;
}

// A schedule in a V, each rank's list by `list_of(rank, microbatches)`. The patterns want some microbatches: of fewer, those that are
// missing are left out.
template <class ListOf>
Schedule in_v(std::string name, const PipelineSize& sizes, int fewest, ListOf list_of) {
  check_sizes(name, sizes, 2);
  Schedule schedule{std::move(name), sizes.microbatches, v_placement(sizes.ranks), {}};
  for (int rank = 0; rank < sizes.ranks; ++rank) schedule.ranks.push_back(list_of(rank, std::max(fewest, sizes.microbatches)));
  return changed(schedule, [&](const Action& action) { return up_to(action, sizes.microbatches); });
}

inline std::vector<Action> zbv_list(int ranks, int rank, int microbatches) {
  VList list(ranks, rank);
  const auto pass = [&](int chunk) { list.forward(chunk), list.input(chunk), list.weight(chunk); };
  for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) list.forward(0);
  for (int i = 0; i < rank; ++i) list.forward(1), list.forward(0);
  for (int i = 0; i < ranks - rank; ++i) pass(1);
  while (list.forwards(1) < list.forwards(0) || list.forwards(0) < microbatches) {
    if (list.forwards(0) < microbatches) list.forward(0);
    list.input(0), list.weight(0);
    pass(1);
  }
  for (int i = 0; i < rank; ++i) list.input(0), list.input(1);
  for (int i = 0; i < ranks - rank; ++i) list.input(0), list.weight(0);
  for (const int chunk : {1, 0}) {
    while (list.weight(chunk)) continue;
  }
  return std::move(list).list();
}

// The eight steps of DualPipeV.step in github.com/deepseek-ai/DualPipe.
inline std::vector<Action> dualpipev_list(int ranks, int rank, int microbatches) {
  VList list(ranks, rank);
  const int behind = ranks - 1 - rank;
  for (int i = 0; i < 2 * behind; ++i) list.forward(0);
  for (int i = 0; i <= rank; ++i) list.forward(0), list.forward(1);
  for (int i = 0; i < behind; ++i) list.input(1), list.weight(), list.forward(1);
  for (int i = 0; i < microbatches - 2 * ranks + rank + 1; ++i) {
    if (i == 0 && behind == 0) {
      list.forward(0), list.backward(1);  // one after the other, which shortens the bubble
    } else {
      list.pair(0, 1);
    }
    list.pair(1, 0);
  }
  for (int i = 0; i < behind; ++i) list.backward(1), list.pair(1, 0);
  // From the middle of the backwards that are left, their W's wait. Halves alternate between the chunks: 1, 0, 1, 0, ...
  const int whole = rank + 1;
  for (int i = 0; i < 2 * (rank + 1); ++i) i < whole ? list.backward(1 - i % 2) : list.input(1 - i % 2);
  for (int i = 0; i < behind; ++i) list.weight(), list.input(0);
  for (int i = 0; i <= rank; ++i) list.weight();
  return std::move(list).list();
}

}  // namespace detail

inline Schedule zbv(const PipelineSize& sizes) {
  return detail::in_v("zbv", sizes, 2 * sizes.ranks - 1, [&](int rank, int count) { return detail::zbv_list(sizes.ranks, rank, count); });
}

namespace detail {

// When a rank does F of its first and second stage, then I of the second and first, for microbatch 0. Each microbatch comes six units
// behind the one before, so a rank holds a sixth of the time from F to I in activations.
using Pattern = std::array<int, 4>;
inline constexpr int kApart = 6;

inline std::vector<Action> in_pattern(const Pattern& pattern, int ranks, int rank, int microbatches) {
  const int last = 2 * ranks - 1 - rank;
  const std::array<Action, 4> actions{Action{rank, Kind::F}, {last, Kind::F}, {last, Kind::I}, {rank, Kind::I}};
  std::vector<Action> list;
  for (int time = 0; list.size() < actions.size() * microbatches; ++time) {
    for (size_t i = 0; i < actions.size(); ++i) {
      const int since = time - pattern[i];
      if (since < 0 || since % kApart != 0 || since / kApart >= microbatches) continue;
      list.push_back(actions[i]);
      list.back().microbatch = since / kApart;
    }
  }
  return list;
}

// The microbatches in the order of a pattern, with W's where ranks would wait and at most `most` activations on a rank.
inline Schedule by_pattern(std::string name, const PipelineSize& sizes, int most, Pattern (*pattern_of)(int ranks, int rank)) {
  const auto order = in_v(std::move(name), sizes, 1, [&](int rank, int microbatches) {
    return in_pattern(pattern_of(sizes.ranks, rank), sizes.ranks, rank, microbatches);
  });
  std::optional<Schedule> best;
  double least = 0;
  for (const auto& rules : {PlanRules{most, false}, {most}, {most, true, 2}}) {
    auto plan = plan_weights(order, {}, rules);
    const double makespan = plan ? simulate_checked(*plan, {}).makespan : 0;
    if (plan && (!best || makespan < least)) best = std::move(plan), least = makespan;
  }
  return *std::move(best);  // the first always is one: the pattern itself holds no more
}

}  // namespace detail

inline Schedule v_half(const PipelineSize& sizes) {
  const int even = sizes.ranks % 2 == 0;
  return detail::by_pattern("v_half", sizes, sizes.ranks + 1 + even, [](int p, int rank) {
    const int gap = p % 2 == 0 ? 3 : 0;  // without it, two actions would fall on one unit
    return detail::Pattern{2 * rank, 3 * p - rank - 2, 3 * p + gap + 2 * rank - 1, 6 * p + gap - rank - 2};
  });
}

inline Schedule v_min(const PipelineSize& sizes) {
  return detail::by_pattern("v_min", sizes, (sizes.ranks + 1) / 3 * 2 + 2, [](int p, int rank) {
    const int gap = p % 3 == 0 ? 2 : 0;
    return detail::Pattern{rank, 2 * p - rank - 1, 2 * p + gap + rank, 4 * p + gap - rank - 1};
  });
}

inline Schedule dualpipev(const PipelineSize& sizes) {
  return detail::in_v("dualpipev", sizes, 2 * sizes.ranks,
                      [&](int rank, int count) { return detail::dualpipev_list(sizes.ranks, rank, count); });
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
