// The feed-forward layers of many experts, each on its own rows.
#pragma once

#include <dtensor/base/error.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// The weights of all experts, one above the other.
struct Weights {
  at::Tensor w1;       // [experts, hidden, dim]
  at::Tensor w2;       // [experts, dim, hidden]
  at::Tensor w3 = {};  // as w1; undefined: w2 gelu(w1 x), and else w2 (silu(w1 x) * w3 x)
};

// `rows` [rows, dim], the first counts[0] of them for expert 0, and so on -> [rows, dim]. Plain tensors. An expert without rows has a
// gradient, of zeros.
at::Tensor feed_forward(const at::Tensor& rows, const std::vector<int64_t>& counts, const Weights& weights);

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor feed_forward(const at::Tensor& rows, const std::vector<int64_t>& counts, const Weights& weights) {
  if (counts.empty()) {  // a rank without experts takes part in the weights' gradients all the same
    const auto nothing = weights.w1.sum().add(weights.w2.sum());
    return rows.add(weights.w3.defined() ? nothing.add(weights.w3.sum()) : nothing);
  }
  const auto pieces = rows.split_with_sizes(counts);
  const auto w1 = weights.w1.unbind(), w2 = weights.w2.unbind();
  const auto w3 = weights.w3.defined() ? weights.w3.unbind() : std::vector<at::Tensor>();
  std::vector<at::Tensor> results;
  for (size_t e = 0; e < counts.size(); ++e) {
    const auto first = at::mm(pieces[e], w1[e].t());
    const auto hidden = w3.empty() ? at::gelu(first) : at::silu(first).mul(at::mm(pieces[e], w3[e].t()));
    results.push_back(at::mm(hidden, w2[e].t()));
  }
  return at::cat(results);
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
