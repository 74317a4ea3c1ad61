// Schedules whose stages lie in a loop (stage s on rank s mod p): from the order of a rank's forwards, that of its backwards, and how many
// forwards come first.
#pragma once

#include <dtensor/parallel/pipeline/schedule.hpp>

#include <algorithm>
#include <ranges>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// All forwards, then all backwards (Huang et al., "GPipe", 2019).
Schedule gpipe(const PipelineSize& sizes);

// Forward and backward in turns, after the forwards that the stages behind need (Narayanan et al., "PipeDream-Flush", 2021): rank r holds
// at most p-r microbatches.
Schedule one_f_one_b(const PipelineSize& sizes);

// The same with several stages on a rank, which divides the bubble by their number (Narayanan et al., "Megatron-LM", 2021). The
// microbatches pass a rank's stages in rounds of p or more each; they need not divide by p.
Schedule interleaved(const PipelineSize& sizes);

// All forwards of a stage, then those of the rank's next one, and backwards the other way round, microbatches too (Lamy-Poirier,
// "Breadth-First Pipeline Parallelism", 2022). Gradients add up in another order than on one device.
Schedule looped_bfs(const PipelineSize& sizes);

// 1F1B whose backward is split: a rank passes the gradient on first (I) and does its weights (W) where it would wait (Qi et al., "Zero
// Bubble Pipeline Parallelism", 2023: ZB-H1). No more memory than 1F1B's on rank 0.
Schedule zb1p(const PipelineSize& sizes);

// The same with almost twice the forwards first, which fills the rest of the bubble where F = I = W (ZB-H2).
Schedule zb2p(const PipelineSize& sizes);

// zb1p with several stages on a rank.
Schedule interleaved_zb(const PipelineSize& sizes);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline void check_sizes(std::string_view name, const PipelineSize& sizes, int chunks) {
  if (sizes.ranks < 1 || sizes.microbatches < 1)
    refuse({name, " got ", sizes.ranks, " ranks and ", sizes.microbatches,
            " microbatches; expected one or more; hint: the microbatches of one step"});
  if (sizes.chunks != 0 && chunks != 0 && sizes.chunks != chunks)
    refuse({name, " has ", chunks, " stages on a rank; got ", sizes.chunks,
            " chunks; hint: ", chunks == 1 ? "interleaved and interleaved_zb take any number" : "leave the number of chunks out"});
  if (sizes.chunks < 0 || static_cast<int64_t>(sizes.ranks) * std::max(sizes.chunks, 1) >= kTooMany || sizes.microbatches >= kTooMany)
    refuse({name, " got ", sizes.ranks, " ranks, ", sizes.chunks, " chunks and ", sizes.microbatches, " microbatches; expected fewer than ",
            kTooMany, " stages and microbatches"});
}

using Passes = std::vector<std::pair<int, int>>;  // (stage, microbatch)

// How a rank takes its forwards and backwards in turns.
struct Turns {
  int forwards_first = 0;
  bool split = false;      // backwards as I and W,
  int weights_behind = 0;  // each W so many backwards after its own I
};

inline std::vector<Action> in_turns(const Passes& forwards, const Passes& backwards, const Turns& turns) {
  std::vector<Action> list;
  const auto add = [&](Kind kind, const std::pair<int, int>& pass) { list.push_back({pass.first, kind, pass.second}); };
  size_t next = 0, weights = 0;
  while (next < forwards.size() && next < static_cast<size_t>(turns.forwards_first)) add(Kind::F, forwards[next++]);
  for (size_t i = 0; i < backwards.size(); ++i) {
    if (next < forwards.size()) add(Kind::F, forwards[next++]);
    add(turns.split ? Kind::I : Kind::B, backwards[i]);
    if (turns.split && i >= static_cast<size_t>(turns.weights_behind)) add(Kind::W, backwards[weights++]);
  }
  while (turns.split && weights < backwards.size()) add(Kind::W, backwards[weights++]);
  return list;
}

// The microbatches in rounds of p or more, as equal as possible, the longer ones first.
inline std::vector<int> rounds(int microbatches, int ranks) {
  const int count = std::max(1, microbatches / ranks);
  std::vector<int> lengths(count, microbatches / count);
  for (int i = 0; i < microbatches % count; ++i) ++lengths[i];
  return lengths;
}

// In each round, all its microbatches pass one stage of the rank after the other.
inline Passes in_rounds(const std::vector<int>& lengths, std::vector<int> stages) {
  Passes passes;
  for (int begin = 0; const int length : lengths) {
    for (const int stage : stages) {
      for (int i = 0; i < length; ++i) passes.emplace_back(stage, begin + i);
    }
    begin += length;
  }
  return passes;
}

inline std::vector<int> stages_of(const Schedule& schedule, int rank) {
  std::vector<int> stages;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    if (schedule.rank_of_stage[stage] == rank) stages.push_back(stage);
  }
  return stages;
}

// A schedule in a loop, each rank's list by `list_of(rank, its stages)`.
template <class ListOf>
Schedule in_loop(std::string name, const PipelineSize& sizes, int chunks, ListOf list_of) {
  Schedule schedule{std::move(name), sizes.microbatches, loop_placement(sizes.ranks, chunks), {}};
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    std::vector<int> stages(chunks);
    for (int i = 0; i < chunks; ++i) stages[i] = i * sizes.ranks + rank;
    schedule.ranks.push_back(list_of(rank, stages));
  }
  return schedule;
}

inline std::vector<int> reversed(std::vector<int> list) {
  std::ranges::reverse(list);
  return list;
}

// 1F1B in all its forms: `hops` forwards more for each rank behind, and with W split off, `behind` W's waiting for each rank before.
inline Schedule one_f_one_b(std::string name, const PipelineSize& sizes, int chunks, int hops, bool split, int behind) {
  const auto lengths = rounds(sizes.microbatches, sizes.ranks);
  return in_loop(std::move(name), sizes, chunks, [&](int rank, const std::vector<int>& stages) {
    const Turns turns{(chunks - 1) * lengths.front() + hops * (sizes.ranks - 1 - rank), split, behind * rank};
    return in_turns(in_rounds(lengths, stages), in_rounds(lengths, reversed(stages)), turns);
  });
}

inline int chunks_of(const PipelineSize& sizes) { return sizes.chunks > 0 ? sizes.chunks : 2; }

}  // namespace detail

inline Schedule gpipe(const PipelineSize& sizes) {
  detail::check_sizes("gpipe", sizes, 1);
  return detail::in_loop("gpipe", sizes, 1, [&](int, const std::vector<int>& stages) {
    const auto passes = detail::in_rounds({sizes.microbatches}, stages);
    return detail::in_turns(passes, passes, {sizes.microbatches});
  });
}

inline Schedule one_f_one_b(const PipelineSize& sizes) {
  detail::check_sizes("1f1b", sizes, 1);
  return detail::one_f_one_b("1f1b", sizes, 1, /*hops=*/1, /*split=*/false, 0);
}

inline Schedule interleaved(const PipelineSize& sizes) {
  detail::check_sizes("interleaved", sizes, 0);
  return detail::one_f_one_b("interleaved", sizes, detail::chunks_of(sizes), /*hops=*/2, /*split=*/false, 0);
}

inline Schedule looped_bfs(const PipelineSize& sizes) {
  detail::check_sizes("looped_bfs", sizes, 0);
  const int chunks = detail::chunks_of(sizes);
  return detail::in_loop("looped_bfs", sizes, chunks, [&](int, const std::vector<int>& stages) {
    const auto forwards = detail::in_rounds({sizes.microbatches}, stages);
    return detail::in_turns(forwards, {forwards.rbegin(), forwards.rend()}, {chunks * sizes.microbatches});
  });
}

inline Schedule zb1p(const PipelineSize& sizes) {
  detail::check_sizes("zb1p", sizes, 1);
  return detail::one_f_one_b("zb1p", sizes, 1, /*hops=*/1, /*split=*/true, /*behind=*/1);
}

inline Schedule zb2p(const PipelineSize& sizes) {
  detail::check_sizes("zb2p", sizes, 1);
  return detail::one_f_one_b("zb2p", sizes, 1, /*hops=*/2, /*split=*/true, /*behind=*/2);
}

inline Schedule interleaved_zb(const PipelineSize& sizes) {
  detail::check_sizes("interleaved_zb", sizes, 0);
  return detail::one_f_one_b("interleaved_zb", sizes, detail::chunks_of(sizes), /*hops=*/1, /*split=*/true, /*behind=*/1);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
