// A stage of a pipeline on the rank that has it: what it computes, and what it keeps of each microbatch.
#pragma once

#include <dtensor/parallel/pipeline/split_backward.hpp>
#include <dtensor/parallel/pipeline/stage_values.hpp>

#include <functional>
#include <map>
#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Inputs of a stage, on its mesh -> its outputs. The first stage gets the microbatch's inputs, each other one the outputs of the stage
// before.
using StageForward = std::function<TensorVector(const TensorVector& inputs)>;

// What a stage keeps of a microbatch from its forward to the end of its backward.
struct KeptForward {
  TensorVector inputs;                    // leaves; the backward finds the gradients of some
  std::vector<Sent> received;             // how the inputs came
  std::optional<GraphOutputs> outputs{};  // those that need a gradient; none: nothing does
  std::vector<Sent> sent{};               // how the outputs went on
  WeightBackward weights{};               // after I
};

struct Stage {
  int index = 0;
  DeviceMesh mesh;
  StageForward forward;
  int backwards = 0;                  // of the step: how many are still to come
  std::map<int, KeptForward> kept{};  // by microbatch
};

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
