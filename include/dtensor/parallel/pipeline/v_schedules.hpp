// Schedules whose stages lie in a V: two stages a rank, the last one beside the first, so that what rank 0 sends away comes back to it.
#pragma once

#include <dtensor/parallel/pipeline/generators.hpp>
#include <dtensor/parallel/pipeline/plan.hpp>

#include <deque>

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
    waiting_[chunk].push_back(static_cast<int>(order_.size()));
    order_.push_back({stage_[chunk], Kind::W, backwards_[chunk]});
    list_.push_back({stage_[chunk], Kind::I, backwards_[chunk]++});
  }
  // The W that waits longest, of a chunk or of all; none if none waits.
  void weight(int chunk) {
    if (!waiting_[chunk].empty()) take(chunk);
  }
  void weight() {
    if (waiting_[0].empty() || (!waiting_[1].empty() && waiting_[1].front() < waiting_[0].front())) return weight(1);
    weight(0);
  }
  int forwards(int chunk) const { return forwards_[chunk]; }
  bool weights_wait(int chunk) const { return !waiting_[chunk].empty(); }
  std::vector<Action> list() && { return std::move(list_); }

 private:
  void take(int chunk) {
    list_.push_back(order_[waiting_[chunk].front()]);
    waiting_[chunk].pop_front();
  }

  int stage_[2], forwards_[2] = {0, 0}, backwards_[2] = {0, 0};
  std::vector<Action> list_, order_;
  std::deque<int> waiting_[2];
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
    while (list.weights_wait(chunk)) list.weight(chunk);
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

// When a rank does F of its first and second stage, then I of the second and first, for microbatch 0. Each later microbatch comes six units
// behind the one before, so that a microbatch holds its activations only as long as the pattern is high.
using Pattern = std::array<int, 4>;

// The microbatches in the order of a pattern, with W's where ranks would wait and at most `most` activations on a rank.
template <class PatternOf>
Schedule by_pattern(std::string name, const PipelineSize& sizes, int most, PatternOf pattern_of) {
  const auto order = in_v(std::move(name), sizes, 1, [&](int rank, int microbatches) {
    const Pattern pattern = pattern_of(rank);
    const int first = rank, second = 2 * sizes.ranks - 1 - rank;
    const std::array<Action, 4> actions{Action{first, Kind::F}, {second, Kind::F}, {second, Kind::I}, {first, Kind::I}};
    std::vector<std::pair<int, Action>> timed;
    for (size_t i = 0; i < pattern.size(); ++i) {
      for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
        timed.emplace_back(pattern[i] + 6 * microbatch, actions[i]);
        timed.back().second.microbatch = microbatch;
      }
    }
    std::ranges::stable_sort(timed, {}, &std::pair<int, Action>::first);
    std::vector<Action> list;
    for (const auto& [time, action] : timed) list.push_back(action);
    return list;
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
  const int p = sizes.ranks, even = p % 2 == 0;
  return detail::by_pattern("v_half", sizes, p + 1 + even, [&](int rank) {
    return detail::Pattern{2 * rank, 3 * p - rank - 2, 3 * p + 3 * even + 2 * rank - 1, 6 * p + 3 * even - rank - 2};
  });
}

inline Schedule v_min(const PipelineSize& sizes) {
  const int p = sizes.ranks, gap = p % 3 == 0 ? 2 : 0;  // without it, two actions would fall on one unit
  return detail::by_pattern("v_min", sizes, (p + 1) / 3 * 2 + 2, [&](int rank) {
    return detail::Pattern{rank, 2 * p - rank - 1, 2 * p + gap + rank, 4 * p + gap - rank - 1};
  });
}

inline Schedule dualpipev(const PipelineSize& sizes) {
  return detail::in_v("dualpipev", sizes, 2 * sizes.ranks,
                      [&](int rank, int count) { return detail::dualpipev_list(sizes.ranks, rank, count); });
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
