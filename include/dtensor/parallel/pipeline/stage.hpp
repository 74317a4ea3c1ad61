// A stage of a pipeline on the rank that has it: what it computes, and what it keeps of each microbatch.
#pragma once

#include <dtensor/parallel/batch_rows.hpp>
#include <dtensor/parallel/fully_shard.hpp>
#include <dtensor/parallel/pipeline/schedule.hpp>
#include <dtensor/parallel/pipeline/split_backward.hpp>
#include <dtensor/parallel/pipeline/stage_values.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Inputs of a stage, on its mesh -> its outputs. The first stage gets the microbatch's inputs, each other one what the stage before gives
// to it. Values that go past other stages come after these: inputs from the nearest stage first, outputs to the nearest first.
using StageForward = std::function<TensorVector(const TensorVector& inputs)>;

// A value of stage `from` that the later stage `to` takes too.
struct Skip {
  int from = 0, to = 0;
  // A parameter that both stages use: `from` owns it and sums up its gradient. Otherwise it is an output of `from` and an input of `to`.
  at::Tensor tied{};
};

// All that goes from one stage to a later one.
struct Way {
  int from = 0, to = 0;
  bool to_next = false;  // of the microbatches that go along it
  size_t skips = 0;      // outputs that go along it; on the way to the next stage those that come after the usual ones
  TensorVector tied{};   // parameters, which go along it once a step, and their gradients back for each microbatch
  bool carries_nothing() const { return !to_next && skips == 0; }  // of a microbatch
};

// Whether a microbatch goes along it.
inline bool goes_along(const Way& way, const Schedule& schedule, int microbatch) {
  if (schedule.paths.empty()) return true;
  const auto& path = schedule.paths[microbatch];
  const auto found = std::ranges::find(path, way.from);
  return found != path.end() && found + 1 != path.end() && found[1] == way.to;
}

// From each stage to the next, or along the paths, and those of the skips. Throws for a skip that does not lead to a later stage.
inline std::vector<Way> ways_of(const Schedule& schedule, const std::vector<Skip>& skips) {
  const int stages = schedule.stages();
  std::vector<Way> ways;
  if (schedule.paths.empty()) {
    for (int s = 0; s + 1 < stages; ++s) ways.push_back({s, s + 1, true});
  } else {
    for (const auto& [from, to] : edges_of(schedule)) ways.push_back({from, to, true});
  }
  for (const auto& [from, to, tied] : skips) {
    require(schedule.paths.empty(), "pipeline", "values skip stages, and microbatches do too; expected one of them");
    require(0 <= from && from < to && to < stages, "pipeline", "got a skip from stage {} to stage {} of {}; expected a later stage", from,
            to, stages);
    auto way = std::ranges::find_if(ways, [from = from, to = to](const Way& other) { return other.from == from && other.to == to; });
    if (way == ways.end()) way = ways.insert(way, Way{from, to});
    if (tied.defined()) way->tied.push_back(tied);
    way->skips += !tied.defined();
  }
  return ways;
}

// The rows of the whole batch that a microbatch has, by the first input of each; nothing where these have no rows.
inline std::optional<Interval> rows_of_batch(const std::vector<TensorVector>& inputs, int microbatch) {
  Interval rows;
  for (int m = 0; m <= microbatch; ++m) {
    if (inputs[m].empty() || !inputs[m][0].defined() || inputs[m][0].dim() == 0) return {};
    rows = {rows.end, rows.end + inputs[m][0].size(0)};
  }
  return microbatch < 0 ? std::nullopt : std::optional(rows);
}

// What a stage keeps of a microbatch from its forward to the end of its backward.
struct KeptForward {
  std::vector<const Way*> into, out;  // those that the microbatch goes along, the nearest first
  TensorVector inputs{};              // leaves, way after way, each with its tied parameters; the backward finds the gradients of some
  std::vector<std::vector<Sent>> received{};  // how they came, by way
  std::optional<GraphOutputs> outputs{};      // those that need a gradient; none: nothing does
  std::vector<std::vector<Sent>> sent{};      // how the outputs, and tied parameters, went on, by way
  WeightBackward weights{};                   // after I
};

struct Stage {
  int index = 0;
  DeviceMesh mesh;
  StageForward forward;
  std::vector<Way> into{}, out{};     // the nearest first
  TensorVector parameters{};
  bool whole = false;                 // the schedule keeps fully sharded ones so
  int backwards = 0;                  // of the step: how many are still to come
  std::map<int, KeptForward> kept{};  // by microbatch

  void keep_whole(bool keeps) {
    if (std::exchange(whole, keeps) != keeps) keeps ? unshard(parameters) : reshard(parameters);
  }
};

// Parameters that fully_shard() shards are whole as the schedule needs them.
struct Gathering {
  std::vector<TensorVector> parameters{};  // of each stage of this rank, by stage; of the others nothing is read
  int stages = 3;                          // so many of this rank's are whole at once; 0: their units are gathered as they are used
};

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
