// Causal self-attention in which groups of query heads share a head of keys and values (Ainslie et al., "GQA", 2023), with rotary
// positions.
#pragma once

#include <dtensor/nn/rotary_embedding.hpp>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace dtensor::nn {

struct GroupedQueryAttentionOptions {
  int64_t dim = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;  // 0: dim / heads
  double dropout = 0;    // of the attention weights, in training
};

class GroupedQueryAttentionImpl : public torch::nn::Module {
 public:
  // Throws c10::Error when heads is no multiple of kv_heads or, where head_dim is 0, dim is no multiple of heads.
  explicit GroupedQueryAttentionImpl(const GroupedQueryAttentionOptions& options);

  // x [batch, length, dim] -> [batch, length, dim]. `table` is the rotary table for `length` positions and head_dim.
  torch::Tensor forward(const torch::Tensor& x, const RotaryTable& table);

  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};  // without bias

 private:
  GroupedQueryAttentionOptions options_;
};
TORCH_MODULE(GroupedQueryAttention);

}  // namespace dtensor::nn
