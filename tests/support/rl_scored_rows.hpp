// What a model says of a batch's tokens, and its parameters' gradients, to compare ways to lay the batch out.
#pragma once

#include "tests/support/rl_support.hpp"

#include <dtensor/rl/inputs.hpp>

namespace dtensor::test {

struct ScoredRows {
  at::Tensor logp;  // where the weights are not 0
  std::vector<at::Tensor> gradients;
};

// Of log-probabilities [batch, time], and the gradients of their weighted sum. `weights` are plain, the same on every rank.
inline ScoredRows scored_rows(torch::nn::Module& model, const at::Tensor& logp, const at::Tensor& weights) {
  ScoredRows scored;
  {
    const NoSpmd plain;
    scored.logp = full_tensor(logp.detach()).mul(weights.ne(0));
  }
  model.zero_grad();
  logp.mul(rl::detail::beside(weights, logp)).sum().backward();
  const NoSpmd plain;
  for (const auto& parameter : model.parameters()) scored.gradients.push_back(full_tensor(parameter.grad()).clone());
  return scored;
}

inline void require_near(const ScoredRows& got, const ScoredRows& expected) {
  const NoSpmd plain;
  rl_near(got.logp, rl_rows(expected.logp), "log-probabilities");
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    const auto apart = (got.gradients[i] - expected.gradients[i]).abs().max().item<double>();
    require(apart < 1e-12 * std::max(1.0, expected.gradients[i].abs().max().item<double>()), "test", "gradient {} is {} apart", i, apart);
  }
}

}  // namespace dtensor::test
