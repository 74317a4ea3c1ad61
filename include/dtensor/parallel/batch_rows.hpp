// Which rows of a batch a part of a program works on: a microbatch. What is known for each row of the batch, such as where its documents
// begin, is then found for those of the microbatch.
//
//   const auto inputs = ids.tensor_split(4), labels = targets.tensor_split(4);
//   for (int64_t i = 0, begin = 0; i < 4; begin += inputs[i++].size(0)) {
//     const dt::BatchRows rows(dt::Interval{begin, begin + inputs[i].size(0)});
//     loss(model->forward(inputs[i]), labels[i]).backward();
//   }
#pragma once

#include <dtensor/mesh/placement.hpp>

#include <optional>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor {

// While it lives, in this thread. Nests; not copyable. A pipeline does this for its microbatches, and an activation checkpoint where it
// runs its function again.
class BatchRows {
 public:
  // Rows [begin, end) of the whole batch; nothing: all.
  explicit BatchRows(std::optional<Interval> rows) : outer_(std::exchange(now(), rows)) {}
  ~BatchRows() { now() = outer_; }
  BatchRows(const BatchRows&) = delete;
  BatchRows& operator=(const BatchRows&) = delete;

  static std::optional<Interval> current() { return now(); }

 private:
  static std::optional<Interval>& now() {
    static thread_local std::optional<Interval> rows;
    return rows;
  }
  const std::optional<Interval> outer_;
};

}  // namespace dtensor

#pragma GCC visibility pop
