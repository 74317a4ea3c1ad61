// What the models of the zoo have in common: scores of classes from an input, and the loss of the right ones.
#pragma once

#include <torch/nn/module.h>

namespace zoo {

class Model : public torch::nn::Module {
 public:
  // Ids int64 [batch, length] -> scores [batch, length, vocabulary], or images [batch, channels, height, width] -> scores [batch, classes].
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;
};

// The mean cross entropy in nats: scores [..., classes] and targets int64 [...] -> scalar.
inline torch::Tensor loss(const torch::Tensor& scores, const torch::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, scores.size(-1)}), targets.reshape({-1}));
}

}  // namespace zoo
