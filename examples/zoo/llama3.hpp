// Llama 3 (Dubey et al., "The Llama 3 Herd of Models", 2024); Mixtral (Jiang et al., "Mixtral of Experts", 2024), which has experts in
// place of feed-forward layers; and Qwen3's models of experts (Yang et al., "Qwen3 Technical Report", 2025), which normalize heads besides.
// In plain libtorch, for one device. Modules are named as in Meta's and Mistral's checkpoints. Shapes: b batch, t length, d width.
#pragma once

#include "model.hpp"

#include <dtensor/nn/expert_pieces.hpp>
#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/nn/rms_norm.hpp>
#include <dtensor/nn/swiglu.hpp>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>

namespace zoo {

struct Llama3Options {
  int64_t vocabulary = 128256;
  int64_t layers = 32, dim = 4096, heads = 32, kv_heads = 8;
  int64_t hidden = 14336;  // of a feed-forward layer, or of an expert
  double eps = 1e-5;
  bool tied = false;  // the embeddings are the head too
  dtensor::nn::RotaryOptions rotary = {500000, dtensor::nn::RotaryScaling{}};
  int64_t experts = 0;                         // of each layer; 0: one feed-forward layer, without a router
  dtensor::nn::RouterOptions router = {};
  double balance_loss = 0.02;                  // of experts
  int64_t head_dim = 0;                        // 0: dim / heads
  bool head_norms = false;                     // each head of queries and keys is normalized

  int64_t dim_of_head() const { return head_dim > 0 ? head_dim : dim / heads; }
};

class Llama3BlockImpl : public torch::nn::Module {
 public:
  explicit Llama3BlockImpl(const Llama3Options& options);
  torch::Tensor forward(const torch::Tensor& x, const dtensor::nn::RotaryTable& table);  // [b, t, d] -> [b, t, d]
  // The block `name` with its experts in a piece of their own, or one piece where it has none.
  using TableFor = std::function<dtensor::nn::RotaryTable(const torch::Tensor& x)>;
  std::vector<dtensor::Piece> pieces_apart(const std::string& name, const TableFor& table);
  double dropout = 0;

 private:
  // All before the feed-forward layer or the experts: their input, and what they add to.
  std::pair<torch::Tensor, torch::Tensor> attend(const torch::Tensor& x, const dtensor::nn::RotaryTable& table);
  torch::Tensor add(const torch::Tensor& y, const torch::Tensor& x);

  dtensor::nn::GroupedQueryAttention attention_{nullptr};
  dtensor::nn::SwiGLU feed_forward_{nullptr};  // or
  dtensor::nn::MoE experts_{nullptr};
  dtensor::nn::RMSNorm attention_norm_{nullptr}, ffn_norm_{nullptr};
};
TORCH_MODULE(Llama3Block);

class Llama3Impl : public Model {
 public:
  explicit Llama3Impl(const Llama3Options& options);
  torch::Tensor forward(const torch::Tensor& ids) override;
  std::vector<dtensor::Piece> pieces() override;
  std::vector<dtensor::Piece> pieces_apart() override;
  void set_dropout(double dropout) override;
  torch::nn::Embedding tok_embeddings{nullptr};

 private:
  torch::Tensor embed(const torch::Tensor& ids);      // [b, t] -> [b, t, d]
  torch::Tensor scores(const torch::Tensor& x);       // [b, t, d] -> [b, t, vocabulary]
  dtensor::nn::RotaryTable table(const torch::Tensor& x) const;
  Llama3Options options_;
  torch::nn::ModuleList layers_;
  dtensor::nn::RMSNorm norm_{nullptr};
  torch::nn::Linear output_{nullptr};  // empty when tied
};
TORCH_MODULE(Llama3);

}  // namespace zoo
