// A layer of experts: each token is computed by a few of many feed-forward layers, which a router chooses (Shazeer et al., "Outrageously
// Large Neural Networks", 2017).
#pragma once

#include <dtensor/gradients/kept_results.hpp>
#include <dtensor/nn/moe_capacity.hpp>
#include <dtensor/nn/moe_losses.hpp>
#include <dtensor/nn/moe_router.hpp>
#include <dtensor/nn/swiglu.hpp>
#include <dtensor/parallel/expert/expert_parallel.hpp>

#include <torch/nn/modules/linear.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// The feed-forward layers of all experts.
class ExpertsImpl : public torch::nn::Module, public expert::Layer {
 public:
  // gated: w2(silu(w1 x) * w3 x), and else w2 gelu(w1 x).
  ExpertsImpl(int64_t experts, int64_t dim, int64_t hidden, bool gated = true);
  // See mix_experts.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& experts, const torch::Tensor& weights,
                        const expert::Beside& beside = [] {});

  torch::Tensor w1, w2, w3;  // [experts, hidden, dim], [experts, dim, hidden]; w3 as w1 where it is gated
};
TORCH_MODULE(Experts);

struct MoEOptions {
  int64_t dim = 0, hidden = 0, experts = 0;
  RouterOptions router = {};
  bool gated = true;
  // Experts compute so many numbers, projected down from dim before tokens travel and up after: less is sent (NVIDIA's LatentMoE). 0: dim
  int64_t latent = 0;
  int64_t shared_hidden = 0;  // of a feed-forward layer that computes every token, while rows travel (DeepSeekMoE); 0: none
  // An expert takes at most capacity_factor times its equal share of the global batch; 0: all that come. Dropped rows add nothing.
  double capacity_factor = 0;
  std::string drop = "position";  // or probability, see limit_to_capacity
  // Losses, which the layer adds to the gradients by itself. The balance is that of the batch of one forward pass, of each sequence of it,
  // or of all forward passes since update_balance (global).
  double balance_loss = 0, z_loss = 0;
  std::string balance_over = "batch";
  // Balance without a loss: update_balance moves each expert's bias by so much, up where it has fewer tokens than the mean (Wang et al.,
  // 2024; DeepSeek-V3: 0.001).
  double bias_rate = 0;
  bool biased = false;       // has biases whatever the rate: a model that was trained with them
  bool center_bias = false;  // the changes' mean is taken off (torchtitan)
};

// What experts take of a layer's input x [..., dim]: rows [..., dim] (or [..., latent]), and int64 and floating [..., k], see mix_experts.
struct ForExperts {
  at::Tensor x, experts, weights;
};

class MoEImpl : public torch::nn::Module {
 public:
  // Throws for sizes below 1 and options that go together with nothing.
  explicit MoEImpl(const MoEOptions& o);

  // x [batch, length, dim], or any other [..., dim] -> as x. `ids` int64 [batch, length]: the tokens' numbers in the vocabulary, where
  // they choose by hash. Tokens are counted, and losses take part, in training where gradients are
  // recorded: once, also where an activation checkpoint runs it twice.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& ids = {});

  // The same in three parts, of which the second may run on other ranks: finish(experts(chosen.x, chosen.experts, chosen.weights), x).
  // forward computes the shared experts while rows travel, and finish after it; the bits are the same.
  ForExperts choose(const torch::Tensor& x, const torch::Tensor& ids = {});
  torch::Tensor finish(torch::Tensor y, const torch::Tensor& x);

  // How many tokens of the global batch chose each expert since update_balance, before any were dropped: int64 [experts], plain. Every rank
  // calls it. Communicates an all_reduce where tokens are cut.
  torch::Tensor counts() const;
  // How many choices of the global batch a capacity dropped since then. As counts().
  int64_t dropped() const;
  // Changes the biases by the counts, and counts anew. Every rank calls it, after each step of the optimizer.
  void update_balance();
  // The losses' share of the gradients: 1 / microbatches where the loss is divided by that, times the scale of a loss that is scaled.
  double loss_scale = 1;

  Router gate{nullptr};
  Experts experts{nullptr};
  SwiGLU shared_experts{nullptr};  // empty without shared_hidden
  torch::nn::Linear down{nullptr}, up{nullptr};  // empty without latent
  torch::Tensor bias;              // a buffer [experts], float32; undefined without

  // May be changed between steps, but for sizes, router and biased.
  MoEOptions options;

  // Sets the rate, and adds biases where there are none.
  void balance_by_bias(double rate);

 private:
  at::Tensor within_capacity(const Routing& routing);
  at::Tensor counts_for_balance(const Routing& routing);
  at::Tensor add_losses(const at::Tensor& rows, const Routing& routing);
  torch::Tensor with_shared(torch::Tensor y, const torch::Tensor& shared);
  bool counting() const { return is_training() && c10::GradMode::is_enabled(); }
  at::Tensor counts_, dropped_;  // of the ranks' tokens, not yet added up
};
TORCH_MODULE(MoE);

// Calls f(layer) for each MoE of a model.
template <class F>
void for_each_moe(torch::nn::Module& module, const F& f) {
  for (const auto& child : module.modules()) {
    if (auto* layer = dynamic_cast<MoEImpl*>(child.get())) f(*layer);
  }
}
// After each step of the optimizer, on every rank: see MoEImpl.
inline void update_balance(torch::nn::Module& module) { for_each_moe(module, [](MoEImpl& layer) { layer.update_balance(); }); }
inline void set_loss_scale(torch::nn::Module& module, double scale) {
  for_each_moe(module, [&](MoEImpl& layer) { layer.loss_scale = scale; });
}

// -- How ------------------------------------------------------------------------------------------------------------------

inline ExpertsImpl::ExpertsImpl(int64_t experts, int64_t dim, int64_t hidden, bool gated) {
  w1 = register_parameter("w1", detail::linear_weight({experts, hidden, dim}));
  w2 = register_parameter("w2", detail::linear_weight({experts, dim, hidden}));
  if (gated) w3 = register_parameter("w3", detail::linear_weight({experts, hidden, dim}));
}

inline torch::Tensor ExpertsImpl::forward(const torch::Tensor& x, const torch::Tensor& experts, const torch::Tensor& weights,
                                          const expert::Beside& beside) {
  return mix_experts(x, experts, weights, {w1, w2, w3}, mix, beside);
}

inline MoEImpl::MoEImpl(const MoEOptions& o) : options(o) {
  require(o.dim >= 1 && o.hidden >= 1 && o.experts >= 1 && o.shared_hidden >= 0 && o.latent >= 0, "MoE",
          "got dim {}, hidden {}, {} experts, shared hidden {}, latent {}", o.dim, o.hidden, o.experts, o.shared_hidden, o.latent);
  require(o.capacity_factor >= 0 && std::isfinite(o.capacity_factor), "MoE",
          "got a capacity factor of {}; expected a finite number above 0, or 0 for no limit", o.capacity_factor);
  detail::check_drop(o.drop);
  require(o.balance_over == "batch" || o.balance_over == "sequence" || o.balance_over == "global", "MoE",
          "the balance is over a batch, a sequence or global; got '{}'", o.balance_over);
  gate = register_module("gate", Router(o.dim, o.experts, o.router));
  experts = register_module("experts", Experts(o.experts, o.latent > 0 ? o.latent : o.dim, o.hidden, o.gated));
  if (o.router.choose_by == "experts") experts->mix.mean_choices = o.router.top_k;
  const auto projection = [](int64_t in, int64_t out) { return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)); };
  if (o.latent > 0) down = register_module("down", projection(o.dim, o.latent)), up = register_module("up", projection(o.latent, o.dim));
  if (o.shared_hidden > 0) shared_experts = register_module("shared_experts", SwiGLU(o.dim, o.shared_hidden));
  if (o.bias_rate != 0 || o.biased) balance_by_bias(o.bias_rate);
}

inline void MoEImpl::balance_by_bias(double rate) {
  options.bias_rate = rate;
  if (!bias.defined()) bias = register_buffer("bias", torch::zeros({options.experts}));
}

inline torch::Tensor MoEImpl::forward(const torch::Tensor& x, const torch::Tensor& ids) {
  const auto chosen = choose(x, ids);
  at::Tensor shared;
  const auto y = experts(chosen.x, chosen.experts, chosen.weights, [&] {
    if (shared_experts) shared = shared_experts(x);
  });
  return with_shared(y, shared);
}

inline ForExperts MoEImpl::choose(const torch::Tensor& x, const torch::Tensor& ids) {
  const auto routing = gate(x, bias, ids);
  const auto rows = down ? down(x) : x;
  return {counting() ? add_losses(rows, routing) : rows, options.capacity_factor > 0 ? within_capacity(routing) : routing.experts,
          routing.weights};
}

inline torch::Tensor MoEImpl::finish(torch::Tensor y, const torch::Tensor& x) {
  return with_shared(std::move(y), shared_experts ? shared_experts(x) : at::Tensor());
}

inline torch::Tensor MoEImpl::with_shared(torch::Tensor y, const torch::Tensor& shared) {
  if (up) y = up(y);
  return shared.defined() ? y + shared : y;
}

// What is kept in checkpoints is neither exchanged nor counted again.
inline at::Tensor MoEImpl::within_capacity(const Routing& routing) {
  const bool counts = counting();
  const c10::NoGradGuard no_grad;
  return kept_in_checkpoints([&]() -> TensorVector {
    const auto tokens = routing.scores.numel() / options.experts;
    const auto capacity = capacity_of(options.capacity_factor, tokens, options.router.top_k, options.experts);
    const auto kept = limit_to_capacity(routing.experts, routing.weights, options.experts, capacity, options.drop);
    if (counts) {
      const auto now = kept.lt(0).sum() - routing.experts.lt(0).sum();
      dropped_ = dropped_.defined() ? dropped_ + now : now;
    }
    return {kept};
  })[0];
}

inline at::Tensor MoEImpl::counts_for_balance(const Routing& routing) {
  const c10::NoGradGuard no_grad;
  return kept_in_checkpoints([&]() -> TensorVector {
    const auto now = tokens_per_expert(routing.experts, routing.scores);
    counts_ = counts_.defined() ? counts_ + now : now;
    if (options.balance_over == "sequence") return {tokens_per_expert(routing.experts, routing.scores, true)};
    return {options.balance_over == "global" ? counts_ : now};
  })[0];
}

inline at::Tensor MoEImpl::add_losses(const at::Tensor& rows, const Routing& routing) {
  const auto counts = counts_for_balance(routing);
  if (options.balance_loss == 0 && options.z_loss == 0) return rows;
  at::Tensor loss;
  if (options.balance_loss != 0) loss = balance_loss(routing.scores, counts) * options.balance_loss;
  if (options.z_loss != 0) {
    const auto z = nn::z_loss(routing.logits) * options.z_loss;
    loss = loss.defined() ? loss + z : z;
  }
  return with_loss(rows, loss, loss_scale);
}

inline torch::Tensor MoEImpl::counts() const {
  if (counts_.defined()) return full_tensor(counts_);
  const NoSpmd plain;
  return torch::zeros({options.experts}, torch::kLong);
}

inline int64_t MoEImpl::dropped() const { return dropped_.defined() ? full_tensor(dropped_).item<int64_t>() : 0; }

inline void MoEImpl::update_balance() {
  if (bias.defined() && options.bias_rate != 0 && counts_.defined()) {
    torch::NoGradGuard no_grad;
    const auto load = counts_.to(at::kDouble);
    auto change = (load.mean() - load).sign();
    if (options.center_bias) change = change - change.mean();
    bias.add_(change.to(bias.scalar_type()), options.bias_rate);
  }
  counts_ = dropped_ = at::Tensor();
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
