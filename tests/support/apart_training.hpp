// A small model of attention and experts that trains, on one device and with its experts on ranks of their own.
#pragma once

#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/expert_pieces.hpp>
#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/pipeline/disaggregate.hpp>

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace dtensor::test::apart {

constexpr int64_t kWords = 13, kDim = 8, kRows = 6, kLength = 5;
constexpr int kLayers = 2, kSteps = 5;

struct Block : torch::nn::Module {
  explicit Block(const nn::MoEOptions& options) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    attention = register_module("attention", nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{.dim = kDim, .heads = 2,
                                                                                                       .kv_heads = 1}));
    moe = register_module("moe", nn::MoE(options));
  }
  std::pair<at::Tensor, at::Tensor> before(const at::Tensor& x) {
    const auto sum = x + torch::dropout(attention(norm(x), nn::rotary_table(x.size(1), kDim / 2, {}, x)), dropout, is_training());
    return {norm(sum), sum};
  }
  at::Tensor after(const at::Tensor& y, const at::Tensor& sum) { return sum + torch::dropout(y, dropout, is_training()); }
  double dropout = 0;
  torch::nn::LayerNorm norm{nullptr};
  nn::GroupedQueryAttention attention{nullptr};
  nn::MoE moe{nullptr};
};

struct Model : torch::nn::Module {
  Model(const nn::MoEOptions& options, double dropout) {
    words = register_module("words", torch::nn::Embedding(kWords, kDim));
    for (int i = 0; i < kLayers; ++i) {
      blocks->push_back(std::make_shared<Block>(options));
      block(i).dropout = dropout;
    }
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(kDim, kWords));
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = words(ids);
    for (int i = 0; i < kLayers; ++i) {
      const auto [input, sum] = block(i).before(x);
      x = block(i).after(block(i).moe(input), sum);
    }
    return scores(x);
  }
  std::vector<Piece> pieces_apart() {
    std::vector<Piece> all{piece("words", [this](const at::Tensor& ids) { return words(ids); })};
    for (int i = 0; i < kLayers; ++i) {
      const auto name = fmt::format("blocks.{}", i);
      const auto three = nn::expert_pieces(name + ".moe", block(i).moe,
                                           {.modules = name + ".norm|" + name + ".attention",
                                            .before = [this, i](const at::Tensor& x) { return block(i).before(x); },
                                            .after = [this, i](const at::Tensor& y, const at::Tensor& x) { return block(i).after(y, x); }});
      all.insert(all.end(), three.begin(), three.end());
    }
    all.push_back(piece("head", [this](const at::Tensor& x) { return scores(x); }));
    return all;
  }
  at::Tensor scores(const at::Tensor& x) { return head(nn::scored_rows(x)); }
  Block& block(int i) { return *blocks->ptr<Block>(i); }
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};

struct Case {
  nn::MoEOptions options{.dim = kDim, .hidden = 6, .experts = 6, .router = {.dtype = at::kDouble}, .balance_loss = 0.02};
  double dropout = 0;
  int microbatches = 3;
  at::ScalarType dtype = at::kDouble;
  bool clips = true;  // by the norm of gradients, which adds up those of cut experts in another order
};

struct Result {
  std::vector<double> losses, norms, evaluated;
  std::map<std::string, at::Tensor> gradients, parameters, buffers;  // gradients of the first step; of this rank's
  at::Tensor counts;                                                 // of the first layer, in the first step; undefined on experts' ranks
};

inline at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, kWords}), targets.reshape({-1}));
}

inline std::pair<at::Tensor, at::Tensor> batch_of(int step) {
  const NoSpmd plain;
  const auto words = torch::arange(kRows * (kLength + 1)).mul(7 + step).add(step * step).remainder(kWords).view({kRows, kLength + 1});
  return {words.narrow(1, 0, kLength).contiguous(), words.narrow(1, 1, kLength).contiguous()};
}

inline torch::optim::AdamW optimizer_of(const std::vector<at::Tensor>& parameters) {
  return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(1e-2));
}

inline Result on_one_device(const Case& c) {
  torch::manual_seed(1);
  const auto model = std::make_shared<Model>(c.options, c.dropout);
  model->to(c.dtype);
  nn::set_loss_scale(*model, 1.0 / c.microbatches);
  auto optimizer = optimizer_of(model->parameters());
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = batch_of(step);
    const auto x = ids.tensor_split(c.microbatches), y = targets.tensor_split(c.microbatches);
    for (int i = 0; i < c.microbatches; ++i) {
      const auto loss = loss_of(model->forward(x[i]), y[i]) / c.microbatches;
      loss.backward();
      result.losses.push_back(loss.item<double>());
    }
    if (step == 0) result.counts = model->block(0).moe->counts();
    for (const auto& item : model->named_parameters()) {
      if (step == 0) result.gradients[item.key()] = item.value().grad().clone();
    }
    if (c.clips) result.norms.push_back(clip_grad_norm_(model->parameters(), 0.5));
    optimizer.step();
    nn::update_balance(*model);
  }
  model->eval();
  const at::NoGradGuard no_grad;
  const auto [ids, targets] = batch_of(kSteps);
  const auto x = ids.tensor_split(c.microbatches), y = targets.tensor_split(c.microbatches);
  for (int i = 0; i < c.microbatches; ++i) result.evaluated.push_back(loss_of(model->forward(x[i]), y[i]).item<double>());
  for (const auto& item : model->named_parameters()) result.parameters[item.key()] = item.value().detach();
  for (const auto& item : model->named_buffers()) result.buffers[item.key()] = item.value();
  return result;
}

inline DisaggregatedMeshes meshes_of(const std::vector<int>& attention, const std::vector<int>& experts) {
  const auto mesh = [](const std::vector<int>& ranks) {
    return DeviceMesh(c10::kCPU, ranks, {static_cast<int64_t>(ranks.size())}, {"dp"});
  };
  return {mesh(attention), mesh(experts)};
}

inline std::vector<at::Tensor> placed(const at::Tensor& batch, int microbatches, const DeviceMesh& own) {
  std::vector<at::Tensor> all;
  for (const auto& part : batch.tensor_split(microbatches)) all.push_back(distribute_tensor(part, own, {shard(0)}).tensor());
  return all;
}

// With attention's ranks each having a part of each microbatch.
inline Result on_two_meshes(const Case& c, const DisaggregatedMeshes& meshes, const std::string& dispatch = "alltoall") {
  const auto own = stage_mesh({meshes.attention, meshes.experts});
  const Spmd spmd(own);
  torch::manual_seed(1);
  std::shared_ptr<Model> model;
  {
    const DeferredInit deferred(own);
    model = std::make_shared<Model>(c.options, c.dropout);
    model->to(c.dtype);
  }
  if (meshes.experts.contains_this_rank()) expert_parallel(*model, own, {.dims = {"dp"}, .dispatch = dispatch});
  auto pipe = disaggregate(*model, meshes, model->pieces_apart(), {.microbatches = c.microbatches});
  pipe.materialize();
  nn::set_loss_scale(*model, 1.0 / c.microbatches);
  auto optimizer = optimizer_of(pipe.parameters());
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = batch_of(step);
    const auto done = pipe.step(placed(ids, c.microbatches, own), placed(targets, c.microbatches, own),
                                [&](const at::Tensor& y, const at::Tensor& t) { return loss_of(y, t) / c.microbatches; });
    result.losses.insert(result.losses.end(), done.losses.begin(), done.losses.end());
    if (step == 0 && meshes.attention.contains_this_rank()) result.counts = model->block(0).moe->counts();
    for (const auto& [name, parameter] : pipe.named_parameters()) {
      if (step == 0) result.gradients[name] = full_tensor(parameter.grad()).clone();
    }
    if (c.clips) result.norms.push_back(pipe.clip_grad_norm_(0.5));
    optimizer.step();
    nn::update_balance(*model);
  }
  model->eval();
  const auto [ids, targets] = batch_of(kSteps);
  result.evaluated = pipe.evaluate(placed(ids, c.microbatches, own), placed(targets, c.microbatches, own), loss_of).losses;
  for (const auto& [name, parameter] : pipe.named_parameters()) result.parameters[name] = full_tensor(parameter.detach());
  if (meshes.attention.contains_this_rank()) {
    for (const auto& [name, buffer] : pipe.named_buffers()) result.buffers[name] = full_tensor(buffer);
  }
  return result;
}

// `tolerance` of the largest number, and at least of 1; 0: in every bit.
inline void check(const Result& got, const Result& expected, double tolerance) {
  const NoSpmd plain;
  const auto close = [&](double a, double b) { return std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b)); };
  const auto same_numbers = [&](const std::vector<double>& a, const std::vector<double>& b, const char* what) {
    require(std::ranges::equal(a, b, close), "test", "{} {}, expected {}", what, fmt::join(a, " "), fmt::join(b, " "));
  };
  same_numbers(got.losses, expected.losses, "losses");
  same_numbers(got.norms, expected.norms, "norms");
  same_numbers(got.evaluated, expected.evaluated, "evaluated losses");
  const auto same = [&](const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b, const char* what) {
    for (const auto& [name, tensor] : a) {
      const auto& other = b.at(name);
      const auto difference = (tensor - other).abs().max().item<double>();
      require(difference <= tolerance * std::max(1.0, other.abs().max().item<double>()), "test", "the {} of '{}' differs by {}", what, name,
              difference);
    }
  };
  require(!got.parameters.empty() && got.gradients.size() == got.parameters.size(), "test", "the rank has {} parameters and {} gradients",
          got.parameters.size(), got.gradients.size());
  same(got.gradients, expected.gradients, "gradient");
  same(got.parameters, expected.parameters, "value");
  same(got.buffers, expected.buffers, "buffer");
  require(!got.counts.defined() || got.counts.equal(expected.counts), "test", "the counts differ");
}

}  // namespace dtensor::test::apart
