// All schedules by name.
#pragma once

#include <dtensor/parallel/pipeline/automatic.hpp>

#include <cctype>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

struct NamedSchedule {
  std::string_view name;
  std::string_view pytorch;  // PyTorch's name for it; empty: it has none
  int chunks;                // stages of a rank; 0: any number
  std::string_view what;
  Schedule (*make)(const PipelineSize& sizes);
};

// In the order of docs/pipeline_schedules.md.
const std::vector<NamedSchedule>& named_schedules();

// The schedule of that name, or of PyTorch's for it; upper and lower case are the same. Throws for others.
Schedule make_schedule(std::string_view name, const PipelineSize& sizes);

// -- How -----------------------------------------------------------------------------------------------------------------

inline const std::vector<NamedSchedule>& named_schedules() {
  static const std::vector<NamedSchedule> all{
      {"gpipe", "GPipe", 1, "all forwards, then all backwards", gpipe},
      {"1f1b", "1F1B", 1, "forward and backward in turns", one_f_one_b},
      {"interleaved", "Interleaved1F1B", 0, "1f1b with several stages on a rank: the bubble is divided by their number", interleaved},
      {"looped_bfs", "LoopedBFS", 0, "several stages on a rank, all microbatches through one before the next", looped_bfs},
      {"zb1p", "", 1, "1f1b with the backward in two halves, the second where ranks would wait (ZB-H1)", zb1p},
      {"zb2p", "", 1, "the same with twice the memory and almost no bubble (ZB-H2)", zb2p},
      {"interleaved_zb", "InterleavedZeroBubble", 0, "zb1p with several stages on a rank", interleaved_zb},
      {"zbv", "ZBVZeroBubble", 2, "stages in a V: no bubble in a rank's own span where F = I = W", zbv},
      {"v_half", "", 2, "stages in a V, half of 1f1b's memory", v_half},
      {"v_min", "", 2, "stages in a V, a third of 1f1b's memory", v_min},
      {"dualpipev", "DualPipeV", 2, "stages in a V, forwards and backwards overlapped in pairs", dualpipev},
      {"automatic", "", 0, "the best found for given costs and memory", [](const PipelineSize& sizes) { return automatic(sizes); }},
  };
  return all;
}

inline Schedule make_schedule(std::string_view name, const PipelineSize& sizes) {
  const auto same = [&](std::string_view other) {
    return std::ranges::equal(name, other, [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); });
  };
  std::string names;
  for (const auto& schedule : named_schedules()) {
    if (same(schedule.name) || (!schedule.pytorch.empty() && same(schedule.pytorch))) return schedule.make(sizes);
    names.append(names.empty() ? "" : ", ").append(schedule.name);
  }
  detail::refuse({"there is no schedule '", name.substr(0, 64), "'; expected one of ", names,
                  "; hint: PyTorch's names are understood too, and a schedule of your own is a function that returns one"});
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
