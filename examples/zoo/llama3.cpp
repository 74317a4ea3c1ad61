// The model of llama3.hpp.
#include "llama3.hpp"

#include <dtensor/parallel/marks.hpp>

#include <torch/nn/init.h>

namespace zoo {

Llama3BlockImpl::Llama3BlockImpl(const Llama3Options& o)
    : attention_(register_module("attention", dtensor::nn::GroupedQueryAttention(dtensor::nn::GroupedQueryAttentionOptions{
                                                  .dim = o.dim,
                                                  .heads = o.heads,
                                                  .kv_heads = o.kv_heads,
                                                  .head_dim = o.head_dim,
                                                  .norm_eps = o.head_norms ? o.eps : 0}))),
      feed_forward_(o.experts == 0 ? register_module("feed_forward", dtensor::nn::SwiGLU(o.dim, o.hidden)) : nullptr),
      experts_(o.experts > 0 ? register_module("feed_forward", dtensor::nn::MoE(dtensor::nn::MoEOptions{
                                                                    .dim = o.dim,
                                                                    .hidden = o.hidden,
                                                                    .experts = o.experts,
                                                                    .router = o.router,
                                                                    .balance_loss = o.balance_loss}))
                             : nullptr),
      attention_norm_(register_module("attention_norm", dtensor::nn::RMSNorm(o.dim, o.eps))),
      ffn_norm_(register_module("ffn_norm", dtensor::nn::RMSNorm(o.dim, o.eps))) {}

std::pair<torch::Tensor, torch::Tensor> Llama3BlockImpl::attend(const torch::Tensor& x, const dtensor::nn::RotaryTable& table) {
  const auto sum = x + at::dropout(attention_(attention_norm_(x), table), dropout, is_training());
  return {ffn_norm_(sum), sum};
}

torch::Tensor Llama3BlockImpl::add(const torch::Tensor& y, const torch::Tensor& x) { return x + at::dropout(y, dropout, is_training()); }

torch::Tensor Llama3BlockImpl::forward(const torch::Tensor& x, const dtensor::nn::RotaryTable& table) {
  const auto [normal, sum] = attend(x, table);
  return add(experts_ ? experts_(normal) : feed_forward_(normal), sum);
}

std::vector<dtensor::Piece> Llama3BlockImpl::pieces_apart(const std::string& name, const TableFor& table) {
  if (!experts_) return {dtensor::piece(name, [this, table](const torch::Tensor& x) { return forward(x, table(x)); })};
  return dtensor::nn::expert_pieces(name + ".feed_forward", experts_,
                                    {.modules = name + ".attention|" + name + ".attention_norm|" + name + ".ffn_norm",
                                     .before = [this, table](const torch::Tensor& x) { return attend(x, table(x)); },
                                     .after = [this](const torch::Tensor& y, const torch::Tensor& x) { return add(y, x); }});
}

Llama3Impl::Llama3Impl(const Llama3Options& options)
    : tok_embeddings(register_module("tok_embeddings", torch::nn::Embedding(options.vocabulary, options.dim))), options_(options) {
  for (int64_t i = 0; i < options.layers; ++i) layers_->push_back(Llama3Block(options));
  register_module("layers", layers_);
  norm_ = register_module("norm", dtensor::nn::RMSNorm(options.dim, options.eps));
  if (!options.tied) {
    output_ = register_module("output", torch::nn::Linear(torch::nn::LinearOptions(options.dim, options.vocabulary).bias(false)));
  }
  for (auto& parameter : parameters()) {  // what the checkpoints' configuration says: initializer_range
    if (parameter.dim() >= 2) torch::nn::init::normal_(parameter, 0, 0.02);
  }
}

torch::Tensor Llama3Impl::embed(const torch::Tensor& ids) { return dtensor::lay_out_like(tok_embeddings(ids), ids); }

dtensor::nn::RotaryTable Llama3Impl::table(const torch::Tensor& x) const {
  return dtensor::nn::rotary_table(x.size(1), options_.dim_of_head(), options_.rotary, x);
}

torch::Tensor Llama3Impl::scores(const torch::Tensor& x) {
  const auto last = norm_(x);
  return options_.tied ? at::linear(last, tok_embeddings->weight) : output_(last);
}

torch::Tensor Llama3Impl::forward(const torch::Tensor& ids) {
  auto x = embed(ids);
  const auto positions = table(x);
  for (const auto& layer : *layers_) x = layer->as<Llama3Block>()->forward(x, positions);
  return scores(dtensor::nn::scored_rows(x));
}

std::vector<dtensor::Piece> Llama3Impl::pieces() {
  std::vector<dtensor::Piece> all{dtensor::piece("tok_embeddings", [this](const torch::Tensor& ids) { return embed(ids); })};
  for (size_t i = 0; i < layers_->size(); ++i) {
    all.push_back(dtensor::piece("layers." + std::to_string(i), [this, layer = layers_->ptr<Llama3BlockImpl>(i)](const torch::Tensor& x) {
      return layer->forward(x, table(x));
    }));
  }
  const auto* head = options_.tied ? "norm|tok_embeddings" : "norm|output";
  all.push_back(dtensor::piece(head, [this](const torch::Tensor& x) { return scores(x); }));
  return all;
}

std::vector<dtensor::Piece> Llama3Impl::pieces_apart() {
  if (options_.experts == 0) return Model::pieces_apart();
  auto whole = pieces();
  std::vector<dtensor::Piece> all{whole.front()};
  for (size_t i = 0; i < layers_->size(); ++i) {
    const auto name = "layers." + std::to_string(i);
    const auto block = layers_->ptr<Llama3BlockImpl>(i)->pieces_apart(name, [this](const auto& x) { return table(x); });
    all.insert(all.end(), block.begin(), block.end());
  }
  all.push_back(whole.back());
  return all;
}

void Llama3Impl::set_dropout(double dropout) {
  for (const auto& layer : *layers_) layer->as<Llama3Block>()->dropout = dropout;
}

}  // namespace zoo
