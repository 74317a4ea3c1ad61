// GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), in plain libtorch, for one device. Its modules are
// named as in the published checkpoints, whose linear weights are transposed. Shapes: b batch, t length, d width.
#pragma once

#include "model.hpp"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace zoo {

struct Gpt2Options {
  int64_t vocabulary = 50257, positions = 1024;
  int64_t layers = 12, dim = 768, heads = 12;
  double dropout = 0;  // 0.1 in publication
};

class Gpt2AttentionImpl : public torch::nn::Module {
 public:
  explicit Gpt2AttentionImpl(const Gpt2Options& options);
  torch::Tensor forward(const torch::Tensor& x);  // [b, t, d] -> [b, t, d]
  torch::nn::Linear c_attn{nullptr}, c_proj{nullptr};
  double dropout;

 private:
  int64_t heads_;
};
TORCH_MODULE(Gpt2Attention);

class Gpt2MlpImpl : public torch::nn::Module {
 public:
  explicit Gpt2MlpImpl(const Gpt2Options& options);
  torch::Tensor forward(const torch::Tensor& x);  // [b, t, d] -> [b, t, d]
  torch::nn::Linear c_fc{nullptr}, c_proj{nullptr};
};
TORCH_MODULE(Gpt2Mlp);

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  explicit Gpt2BlockImpl(const Gpt2Options& options);
  torch::Tensor forward(torch::Tensor x);  // [b, t, d] -> [b, t, d]
  void set_dropout(double dropout);

 private:
  torch::nn::LayerNorm ln_1_{nullptr}, ln_2_{nullptr};
  Gpt2Attention attn_{nullptr};
  Gpt2Mlp mlp_{nullptr};
  double dropout_;
};
TORCH_MODULE(Gpt2Block);

class Gpt2Impl : public Model {
 public:
  explicit Gpt2Impl(const Gpt2Options& options);
  torch::Tensor forward(const torch::Tensor& ids) override;  // throws c10::Error when t is more than options.positions
  std::vector<dtensor::Piece> pieces() override;
  void set_dropout(double dropout) override;
  torch::nn::Embedding wte{nullptr}, wpe{nullptr};           // wte is the head too

 private:
  torch::Tensor embed(const torch::Tensor& ids);  // [b, t] -> [b, t, d]
  torch::nn::ModuleList h_;
  torch::nn::LayerNorm ln_f_{nullptr};
  double dropout_;
};
TORCH_MODULE(Gpt2);

}  // namespace zoo
