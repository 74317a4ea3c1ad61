// The model of deepseek.hpp.
#include "deepseek.hpp"

#include <dtensor/parallel/marks.hpp>

#include <torch/nn/init.h>

namespace zoo {

namespace {

dtensor::nn::LatentAttentionOptions attention_of(const DeepSeekOptions& o) {
  return {.dim = o.dim,
          .heads = o.heads,
          .q_rank = o.q_rank,
          .kv_rank = o.kv_rank,
          .nope_dim = o.nope_dim,
          .rope_dim = o.rope_dim,
          .value_dim = o.value_dim,
          .eps = o.eps,
          .scale = dtensor::nn::yarn_attention_scale(o.rotary)};
}

dtensor::nn::MoEOptions experts_of(const DeepSeekOptions& o) {
  return {.dim = o.dim,
          .hidden = o.expert_hidden,
          .experts = o.experts,
          .router = o.router,
          .shared_hidden = o.shared_hidden,
          .balance_loss = o.balance_loss,
          .balance_over = "sequence",
          .bias_rate = o.bias_rate,
          .biased = true};
}

}  // namespace

DeepSeekBlockImpl::DeepSeekBlockImpl(const DeepSeekOptions& o, bool has_experts)
    : attention_(register_module("attention", dtensor::nn::LatentAttention(attention_of(o)))),
      feed_forward_(has_experts ? nullptr : register_module("feed_forward", dtensor::nn::SwiGLU(o.dim, o.hidden))),
      experts_(has_experts ? register_module("feed_forward", dtensor::nn::MoE(experts_of(o))) : nullptr),
      attention_norm_(register_module("attention_norm", dtensor::nn::RMSNorm(o.dim, o.eps))),
      ffn_norm_(register_module("ffn_norm", dtensor::nn::RMSNorm(o.dim, o.eps))) {}

std::pair<torch::Tensor, torch::Tensor> DeepSeekBlockImpl::attend(const torch::Tensor& x, const dtensor::nn::RotaryTable& table) {
  const auto sum = x + at::dropout(attention_(attention_norm_(x), table), dropout, is_training());
  return {ffn_norm_(sum), sum};
}

torch::Tensor DeepSeekBlockImpl::add(const torch::Tensor& y, const torch::Tensor& x) { return x + at::dropout(y, dropout, is_training()); }

torch::Tensor DeepSeekBlockImpl::forward(const torch::Tensor& x, const dtensor::nn::RotaryTable& table) {
  const auto [normal, sum] = attend(x, table);
  return add(experts_ ? experts_(normal) : feed_forward_(normal), sum);
}

std::vector<dtensor::Piece> DeepSeekBlockImpl::pieces_apart(const std::string& name, const TableFor& table) {
  if (!experts_) return {dtensor::piece(name, [this, table](const torch::Tensor& x) { return forward(x, table(x)); })};
  return dtensor::nn::expert_pieces(name + ".feed_forward", experts_,
                                    {.modules = name + ".attention|" + name + ".attention_norm|" + name + ".ffn_norm",
                                     .before = [this, table](const torch::Tensor& x) { return attend(x, table(x)); },
                                     .after = [this](const torch::Tensor& y, const torch::Tensor& x) { return add(y, x); }});
}

DeepSeekImpl::DeepSeekImpl(const DeepSeekOptions& options)
    : options_(options), tok_embeddings_(register_module("tok_embeddings", torch::nn::Embedding(options.vocabulary, options.dim))) {
  for (int64_t i = 0; i < options.layers; ++i) layers_->push_back(DeepSeekBlock(options, i >= options.dense_layers));
  register_module("layers", layers_);
  norm_ = register_module("norm", dtensor::nn::RMSNorm(options.dim, options.eps));
  output_ = register_module("output", torch::nn::Linear(torch::nn::LinearOptions(options.dim, options.vocabulary).bias(false)));
  for (auto& parameter : parameters()) {
    if (parameter.dim() >= 2) torch::nn::init::normal_(parameter, 0, 0.006);
  }
}

torch::Tensor DeepSeekImpl::embed(const torch::Tensor& ids) { return dtensor::lay_out_like(tok_embeddings_(ids), ids); }

dtensor::nn::RotaryTable DeepSeekImpl::table(const torch::Tensor& x) const {
  return dtensor::nn::rotary_table(x.size(1), options_.rope_dim, options_.rotary, x);
}

torch::Tensor DeepSeekImpl::scores(const torch::Tensor& x) { return output_(norm_(x)); }

torch::Tensor DeepSeekImpl::forward(const torch::Tensor& ids) {
  auto x = embed(ids);
  const auto positions = table(x);
  for (const auto& layer : *layers_) x = layer->as<DeepSeekBlock>()->forward(x, positions);
  return scores(dtensor::nn::scored_rows(x));
}

std::vector<dtensor::Piece> DeepSeekImpl::pieces() {
  std::vector<dtensor::Piece> all{dtensor::piece("tok_embeddings", [this](const torch::Tensor& ids) { return embed(ids); })};
  for (size_t i = 0; i < layers_->size(); ++i) {
    all.push_back(dtensor::piece("layers." + std::to_string(i), [this, layer = layers_->ptr<DeepSeekBlockImpl>(i)](const torch::Tensor& x) {
      return layer->forward(x, table(x));
    }));
  }
  all.push_back(dtensor::piece("norm|output", [this](const torch::Tensor& x) { return scores(x); }));
  return all;
}

std::vector<dtensor::Piece> DeepSeekImpl::pieces_apart() {
  auto whole = pieces();
  std::vector<dtensor::Piece> all{whole.front()};
  for (size_t i = 0; i < layers_->size(); ++i) {
    const auto name = "layers." + std::to_string(i);
    const auto block = layers_->ptr<DeepSeekBlockImpl>(i)->pieces_apart(name, [this](const auto& x) { return table(x); });
    all.insert(all.end(), block.begin(), block.end());
  }
  all.push_back(whole.back());
  return all;
}

void DeepSeekImpl::set_dropout(double dropout) {
  for (const auto& layer : *layers_) layer->as<DeepSeekBlock>()->dropout = dropout;
}

}  // namespace zoo
