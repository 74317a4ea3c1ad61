// DeepSeek-V3 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024) without its layers for further tokens: latent attention, and experts that
// are kept equally busy by biases, of which each token has one for itself besides. In plain libtorch, for one device. Modules are named as
// in DeepSeek's own code and llama3.hpp. Shapes: b batch, t length, d width.
#pragma once

#include "model.hpp"

#include <dtensor/nn/expert_pieces.hpp>
#include <dtensor/nn/latent_attention.hpp>
#include <dtensor/nn/rms_norm.hpp>
#include <dtensor/nn/swiglu.hpp>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>

namespace zoo {

struct DeepSeekOptions {
  int64_t vocabulary = 129280;
  int64_t layers = 61, dim = 7168, heads = 128;
  int64_t q_rank = 1536, kv_rank = 512, nope_dim = 128, rope_dim = 64, value_dim = 128;  // see LatentAttention
  int64_t dense_layers = 3, hidden = 18432;                                              // the first layers have no experts
  int64_t experts = 256, expert_hidden = 2048, shared_hidden = 2048;
  double eps = 1e-6;
  dtensor::nn::RotaryOptions rotary = {10000, {}, dtensor::nn::YarnScaling{}};
  dtensor::nn::RouterOptions router = {.top_k = 8, .scores = "sigmoid", .scale = 2.5, .groups = 8, .top_groups = 4};
  double balance_loss = 0.0001, bias_rate = 0.001;  // the loss is of each sequence
};

class DeepSeekBlockImpl : public torch::nn::Module {
 public:
  DeepSeekBlockImpl(const DeepSeekOptions& options, bool has_experts);
  torch::Tensor forward(const torch::Tensor& x, const dtensor::nn::RotaryTable& table);  // [b, t, d] -> [b, t, d]
  // The block `name` with its experts in a piece of their own, or one piece where it has none.
  using TableFor = std::function<dtensor::nn::RotaryTable(const torch::Tensor& x)>;
  std::vector<dtensor::Piece> pieces_apart(const std::string& name, const TableFor& table);
  double dropout = 0;

 private:
  // All before the feed-forward layer or the experts: their input, and what they add to.
  std::pair<torch::Tensor, torch::Tensor> attend(const torch::Tensor& x, const dtensor::nn::RotaryTable& table);
  torch::Tensor add(const torch::Tensor& y, const torch::Tensor& x);

  dtensor::nn::LatentAttention attention_{nullptr};
  dtensor::nn::SwiGLU feed_forward_{nullptr};  // or
  dtensor::nn::MoE experts_{nullptr};
  dtensor::nn::RMSNorm attention_norm_{nullptr}, ffn_norm_{nullptr};
};
TORCH_MODULE(DeepSeekBlock);

class DeepSeekImpl : public Model {
 public:
  explicit DeepSeekImpl(const DeepSeekOptions& options);
  torch::Tensor forward(const torch::Tensor& ids) override;
  std::vector<dtensor::Piece> pieces() override;
  std::vector<dtensor::Piece> pieces_apart() override;
  void set_dropout(double dropout) override;

 private:
  torch::Tensor embed(const torch::Tensor& ids);  // [b, t] -> [b, t, d]
  torch::Tensor scores(const torch::Tensor& x);   // [b, t, d] -> [b, t, vocabulary]
  dtensor::nn::RotaryTable table(const torch::Tensor& x) const;
  DeepSeekOptions options_;
  torch::nn::Embedding tok_embeddings_{nullptr};
  torch::nn::ModuleList layers_;
  dtensor::nn::RMSNorm norm_{nullptr};
  torch::nn::Linear output_{nullptr};
};
TORCH_MODULE(DeepSeek);

}  // namespace zoo
