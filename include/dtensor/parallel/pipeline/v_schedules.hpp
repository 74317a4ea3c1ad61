// Schedules whose stages lie in a V: two stages a rank, the last one beside the first, so that what rank 0 sends away comes back to it.
#pragma once

#include <dtensor/parallel/pipeline/generators.hpp>

#include <deque>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// No bubble between a rank's first and last action where F = I = W, with 1F1B's memory (Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
// section 6).
Schedule zbv(const Sizes& sizes);

// Forward and backward of two stages overlap in pairs, so that the communication of experts hides behind computation (DeepSeek-AI, "DualPipe", 2024, cut
// in half by Sea AI Lab).
Schedule dualpipev(const Sizes& sizes);

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

// A schedule in a V, each rank's list by `list_of(rank, microbatches)`. The patterns want some microbatches: of fewer, those that are missing are left
// out.
template <class ListOf>
Schedule in_v(std::string name, const Sizes& sizes, int fewest, ListOf list_of) {
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

inline Schedule zbv(const Sizes& sizes) {
  return detail::in_v("zbv", sizes, 2 * sizes.ranks - 1, [&](int rank, int count) { return detail::zbv_list(sizes.ranks, rank, count); });
}

inline Schedule dualpipev(const Sizes& sizes) {
  return detail::in_v("dualpipev", sizes, 2 * sizes.ranks, [&](int rank, int count) { return detail::dualpipev_list(sizes.ranks, rank, count); });
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
