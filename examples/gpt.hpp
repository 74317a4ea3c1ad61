// A GPT-2 style language model in plain libtorch, written for one device: embedding, learned positions, pre-norm blocks
// of causal self-attention and a GELU MLP, final norm, head. Shapes: b batch, t sequence, d width, h heads.
#pragma once

#include <torch/nn.h>

struct GptOptions {
  int64_t vocab = 256;
  int64_t layers = 2;
  int64_t dim = 64;      // d, a multiple of heads
  int64_t heads = 4;     // h
  int64_t max_seq = 64;  // the longest sequence that there are positions for
  double dropout = 0;
};

class GptBlockImpl : public torch::nn::Module {
 public:
  explicit GptBlockImpl(const GptOptions& options);
  torch::Tensor forward(torch::Tensor x);  // [b, t, d] -> [b, t, d]

 private:
  torch::Tensor attention(const torch::Tensor& x);  // [b, t, d] -> [b, t, d]

  int64_t heads_;
  double dropout_;
  torch::nn::LayerNorm norm1_, norm2_;
  torch::nn::Linear q_, k_, v_, o_, up_, down_;
};
TORCH_MODULE(GptBlock);

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptOptions& options);

  // The logits of the next token: ids int64 [b, t] -> [b, t, vocab]. Throws when t > max_seq.
  torch::Tensor forward(const torch::Tensor& ids);

  // Its parts, one after the other: what a pipeline is cut between.
  torch::Tensor embed(const torch::Tensor& ids);          // [b, t] -> [b, t, d]
  torch::Tensor block(size_t i, const torch::Tensor& x);  // [b, t, d] -> [b, t, d]
  torch::Tensor score(const torch::Tensor& x);            // [b, t, d] -> [b, t, vocab]

 private:
  double dropout_;
  torch::nn::Embedding tokens_;
  torch::Tensor positions_;  // [max_seq, d]
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Gpt);

// The mean cross entropy, in nats: logits [b, t, vocab], targets int64 [b, t] -> scalar.
torch::Tensor gpt_loss(const torch::Tensor& logits, const torch::Tensor& targets);
