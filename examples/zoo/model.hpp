// What the models of the zoo have in common: scores of classes from an input, and the loss of the right ones.
#pragma once

#include <dtensor/parallel/pipeline/cut.hpp>
#include <torch/nn/module.h>

#include <stdexcept>
#include <vector>

namespace zoo {

class Model : public torch::nn::Module {
 public:
  // Ids int64 [batch, length] -> scores [batch, length, vocabulary], or images [batch, channels, height, width] -> scores [batch, classes].
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;

  // What it computes, piece by piece, for a pipeline.
  virtual std::vector<dtensor::Piece> pieces() { throw std::invalid_argument("this model is not cut into pieces"); }

  // The same with experts in pieces of their own, for dt::disaggregate.
  virtual std::vector<dtensor::Piece> pieces_apart() { throw std::invalid_argument("this model has no experts to put on other ranks"); }

  // How much of what blocks add to the residual stream is dropped in training. 0 in all configurations.
  virtual void set_dropout(double) { throw std::invalid_argument("this model has no dropout"); }
};

// The mean cross entropy in nats: scores [..., classes] and targets int64 [...] -> scalar.
inline torch::Tensor loss(const torch::Tensor& scores, const torch::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, scores.size(-1)}), targets.reshape({-1}));
}

}  // namespace zoo
