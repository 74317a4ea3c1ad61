// Cuts a batch into microbatches.
#pragma once

#include <dtensor/base/error.hpp>

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// `input` and `target`, along dim 0, into parts whose lengths differ by one at most. Throws where they have fewer rows than that, or not as
// many as each other.
inline std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> cut_batch(const at::Tensor& input, const at::Tensor& target,
                                                                             int microbatches) {
  const auto rows_of = [&](const char* what, const at::Tensor& batch) {
    const auto rows = batch.defined() && batch.dim() > 0 ? batch.size(0) : 0;
    require(rows >= microbatches, "pipeline", "the {} has {} rows; expected at least one for each of {} microbatches", what, rows,
            microbatches);
    return rows;
  };
  const auto inputs = rows_of("input", input), targets = rows_of("target", target);
  require(inputs == targets, "pipeline",
          "the input has {} rows and the target {}; expected as many; hint: cut both into microbatches yourself, and give lists, if their "
          "rows belong together otherwise",
          inputs, targets);
  return {input.tensor_split(microbatches, 0), target.tensor_split(microbatches, 0)};
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
