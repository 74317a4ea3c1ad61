// Where each stage begins, for each microbatch, in the stream of random numbers of one device: it draws there what one device would.
#pragma once

#include <dtensor/parallel/pipeline/ranks.hpp>
#include <dtensor/parallel/pipeline/schedule.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/rng/position.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/full.h>

#include <map>
#include <numeric>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// What the sizes of everything inside a pipeline hang on: the sizes, dtypes and layouts of a microbatch, its path, and whether gradients
// are on.
using Signature = std::string;

// One device draws microbatch after microbatch, and stage after stage of its path in each. How much a stage draws for a signature is
// learned from the first microbatch that has it: its forwards run first, stage after stage, each telling the others.
class StageDraws {
 public:
  explicit StageDraws(const PipelineRanks& ranks) : ranks_(ranks) {}

  // A new step. `generator`: this rank's, which is as those of the others.
  void begin(const std::vector<Signature>& signatures, at::Generator generator);

  // The first microbatch of each signature that is new, ascending.
  const std::vector<int>& unknown() const { return unknown_; }

  // Goes to where the stage at `position` of its path begins with `microbatch`.
  void go_to(size_t position, int microbatch);

  // After its forward: throws if the stage drew more or fewer than it did for the first microbatch of this signature. Does nothing where
  // that is being learned.
  void check(size_t position, int microbatch);

  // Called in turn for all stages of an unknown microbatch, by all ranks. Runs `forward` where this rank has the stage.
  template <class Forward>
  void learn(int microbatch, size_t position, int rank_of_stage, Forward forward);

  // The generator goes on after the last stage of the last microbatch.
  void end() { go_to(0, static_cast<int>(signatures_.size())); }

 private:
  int64_t begin_of(int microbatch);
  int64_t begin_of(int microbatch, size_t position);

  const PipelineRanks& ranks_;
  std::map<Signature, std::vector<int64_t>> draws_;  // of each stage
  std::vector<Signature> signatures_;
  std::vector<int> unknown_;
  std::vector<int64_t> begins_;      // of the microbatches, as far as they were asked for
  at::Generator generator_, begin_;  // the rank's, and a copy of it as it was when the step began
};

// `schedule` with the forwards of these microbatches before all else.
Schedule with_first(const Schedule& schedule, const std::vector<int>& microbatches);

// -- How -----------------------------------------------------------------------------------------------------------------

inline void StageDraws::begin(const std::vector<Signature>& signatures, at::Generator generator) {
  signatures_ = signatures;
  generator_ = std::move(generator);
  begin_ = rng::copy_of(generator_);
  begins_ = {0};
  unknown_.clear();
  for (int i = 0; i < static_cast<int>(signatures.size()); ++i) {
    const bool seen =
        draws_.count(signatures[i]) > 0 || std::ranges::any_of(unknown_, [&](int j) { return signatures[j] == signatures[i]; });
    if (!seen) unknown_.push_back(i);
  }
}

inline int64_t StageDraws::begin_of(int microbatch) {
  while (static_cast<int>(begins_.size()) <= microbatch) {
    const auto& counts = draws_.at(signatures_[begins_.size() - 1]);
    begins_.push_back(std::accumulate(counts.begin(), counts.end(), begins_.back()));
  }
  return begins_[microbatch];
}

inline int64_t StageDraws::begin_of(int microbatch, size_t position) {
  auto draws = begin_of(microbatch);
  for (size_t i = 0; i < position; ++i) draws += draws_.at(signatures_[microbatch])[i];
  return draws;
}

inline void StageDraws::go_to(size_t position, int microbatch) {
  const auto draws = begin_of(microbatch, position);
  rng::go_on_from(generator_, begin_);
  rng::skip_draws(generator_, draws);
}

inline void StageDraws::check(size_t position, int microbatch) {
  const auto& counts = draws_.at(signatures_[microbatch]);
  if (position >= counts.size()) return;
  const NoSpmd plain;
  auto place = rng::copy_of(begin_);
  rng::skip_draws(place, begin_of(microbatch, position + 1));
  if (generator_.get_state().equal(place.get_state())) return;
  rng::go_on_from(place, begin_);
  rng::skip_draws(place, begin_of(microbatch, position));
  const auto count = rng::draws_between(place, generator_);
  require(count == counts[position], "pipeline",
          "the stage draws {} random numbers, and drew {} for an earlier microbatch of equal inputs: the stages after it would draw others "
          "than one device; hint: draw as many whatever the values are, also where they are not used",
          count, counts[position]);
}

template <class Forward>
void StageDraws::learn(int microbatch, size_t position, int rank_of_stage, Forward forward) {
  auto& counts = draws_[signatures_[microbatch]];
  int64_t count = 0;
  if (rank_of_stage == ranks_.own()) {
    go_to(position, microbatch);
    const auto before = rng::copy_of(generator_);
    forward();
    count = rng::draws_between(before, generator_);
  }
  const NoSpmd plain;
  const auto told = ranks_.broadcast(at::full({1}, count, at::kLong), rank_of_stage);
  counts.push_back(told.item<int64_t>());
}

inline Schedule with_first(const Schedule& schedule, const std::vector<int>& microbatches) {
  const auto is_first = [&](const Action& action) {
    return std::ranges::find(microbatches, action.microbatch) != microbatches.end() &&
           (action.kind == Kind::F || action.kind == Kind::OVERLAP_F_B);
  };
  auto result = schedule;
  for (auto& list : result.ranks) list.clear();
  for (const int microbatch : microbatches) {
    for (const int s : schedule.path(microbatch)) result.ranks[schedule.rank_of_stage[s]].push_back({s, Kind::F, microbatch});
  }
  for (size_t r = 0; r < schedule.ranks.size(); ++r) {
    for (const auto& action : schedule.ranks[r]) {
      if (!is_first(action)) {
        result.ranks[r].push_back(action);
      } else if (action.kind == Kind::OVERLAP_F_B) {
        result.ranks[r].push_back({action.other_stage, Kind::B, action.other_microbatch});
      }
    }
  }
  return result;
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
