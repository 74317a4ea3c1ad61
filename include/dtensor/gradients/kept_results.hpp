// Results that stay in memory where an activation checkpoint drops all else, because they cost much and take little: those of attention
// over cut sequences, which would send all its messages again. <dtensor/dtensor.hpp> does not include this header.
//
//   auto results = dt::kept_in_checkpoints([&] { return std::vector<at::Tensor>{expensive(x)}; });
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// What keeps results for a function that will run again, and gives them then.
class ResultKeeper {
 public:
  using Compute = std::function<std::vector<at::Tensor>()>;
  virtual ~ResultKeeper() = default;
  virtual std::vector<at::Tensor> keep(const Compute& compute) = 0;
};

// From construction to destruction, `keeper` keeps the results of this thread. Of several the innermost is asked.
class KeepWith {
 public:
  explicit KeepWith(ResultKeeper* keeper) : outer_(std::exchange(now(), keeper)) {}
  ~KeepWith() { now() = outer_; }
  KeepWith(const KeepWith&) = delete;
  KeepWith& operator=(const KeepWith&) = delete;

  static ResultKeeper* current() { return now(); }

 private:
  static ResultKeeper*& now() {
    static thread_local ResultKeeper* keeper = nullptr;
    return keeper;
  }
  ResultKeeper* const outer_;
};

// What `compute` gives; some of the tensors may be undefined. Where dt::checkpoint runs a function for the second time, it is not called
// again, and these are the tensors of the first time. So it must draw no random numbers, and nobody may write to its results. To be called
// where gradients are off, as in the forward of a torch::autograd::Function.
inline std::vector<at::Tensor> kept_in_checkpoints(const ResultKeeper::Compute& compute) {
  return KeepWith::current() ? KeepWith::current()->keep(compute) : compute();
}

}  // namespace dtensor

#pragma GCC visibility pop
