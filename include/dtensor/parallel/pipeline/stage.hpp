// A stage of a pipeline on the rank that has it: what it computes, and what it keeps of each microbatch.
#pragma once

#include <dtensor/parallel/pipeline/split_backward.hpp>
#include <dtensor/parallel/pipeline/stage_values.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Inputs of a stage, on its mesh -> its outputs. The first stage gets the microbatch's inputs, each other one what the stage before gives to
// it. Values that go past other stages come after these: inputs from the nearest stage first, outputs to the nearest first.
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
  size_t skips = 0;     // outputs that go along it; on the way to the next stage those that come after the usual ones
  TensorVector tied{};  // parameters, which go along it once a step, and their gradients back for each microbatch
  bool to_next() const { return to == from + 1; }
  bool carries_nothing() const { return !to_next() && skips == 0; }  // of a microbatch
};

// From each stage to the next, and those of the skips. Throws for a skip that does not lead to a later stage.
inline std::vector<Way> ways_of(int stages, const std::vector<Skip>& skips) {
  std::vector<Way> ways;
  for (int s = 0; s + 1 < stages; ++s) ways.push_back({s, s + 1});
  for (const auto& [from, to, tied] : skips) {
    require(0 <= from && from < to && to < stages, "pipeline", "got a skip from stage {} to stage {} of {}; expected a later stage", from, to,
            stages);
    auto way = std::ranges::find_if(ways, [from = from, to = to](const Way& other) { return other.from == from && other.to == to; });
    if (way == ways.end()) way = ways.insert(way, {from, to});
    if (tied.defined()) way->tied.push_back(tied);
    way->skips += !tied.defined();
  }
  return ways;
}

// What a stage keeps of a microbatch from its forward to the end of its backward.
struct KeptForward {
  TensorVector inputs;                      // leaves, way after way, each with its tied parameters; the backward finds the gradients of some
  std::vector<std::vector<Sent>> received;  // how they came, by way
  std::optional<GraphOutputs> outputs{};    // those that need a gradient; none: nothing does
  std::vector<std::vector<Sent>> sent{};    // how the outputs, and tied parameters, went on, by way
  WeightBackward weights{};                 // after I
};

struct Stage {
  int index = 0;
  DeviceMesh mesh;
  StageForward forward;
  std::vector<Way> into{}, out{};     // the nearest first
  int backwards = 0;                  // of the step: how many are still to come
  std::map<int, KeptForward> kept{};  // by microbatch
};

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
