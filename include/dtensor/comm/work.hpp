// Handles of collectives that may still be under way.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::comm {

class Work : public c10::intrusive_ptr_target {
 public:
  // Blocks until the result may be read and the input may be written again. If a peer failed or diverged, or the deadline passed, throws a
  // dtensor::Error that names rank, operation and sequence number. May be called repeatedly.
  virtual void wait() = 0;

  // Whether wait() would return (or throw) at once.
  virtual bool done() = 0;
};
using WorkPtr = c10::intrusive_ptr<Work>;

// Several that are under way, as one. None: done.
class AllOf final : public Work {
 public:
  explicit AllOf(std::vector<WorkPtr> works) : works_(std::move(works)) {}
  void wait() override {
    for (const auto& work : works_) work->wait();
  }
  bool done() override {
    return std::ranges::all_of(works_, [](const WorkPtr& work) { return work->done(); });
  }

 private:
  const std::vector<WorkPtr> works_;
};

// A result, and the work that fills it. `work` is null if the result is already complete.
struct Async {
  at::Tensor tensor;
  WorkPtr work;

  // Waits, and returns the finished result.
  at::Tensor get() && {
    if (work) work->wait();
    return std::move(tensor);
  }
};

}  // namespace dtensor::comm

#pragma GCC visibility pop
