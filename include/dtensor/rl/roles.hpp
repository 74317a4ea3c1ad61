// The roles of PPO and GRPO: an actor that scores and learns, its rollouts, a reference, a critic. Every rank makes them and calls their
// methods alike; each adds columns to a batch that rollout() began.
//
//   rl::Actor<Llama> actor(options, mesh, [&] { return std::make_shared<Llama>(config); }, plan);
//   rl::Rollouts<Llama> rollouts(actor, mesh);
//   auto batch = rollouts.generate(prompts, {.samples = 8});
//   ... scores, advantages ...
//   auto metrics = actor.update(batch, options, step);
#pragma once

#include <dtensor/rl/algorithms.hpp>
#include <dtensor/rl/cut_passes.hpp>
#include <dtensor/rl/hybrid.hpp>
#include <dtensor/rl/turns.hpp>
#include <dtensor/rl/value_loss.hpp>
#include <dtensor/rl/sft.hpp>
#include <dtensor/training/clip.hpp>

#include <dtensor/optim/fused_adamw.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Sums of numbers over the parts of a batch, by name, which are read once.
class Sums {
 public:
  void add(const std::string& name, const at::Tensor& x);
  // Divided by `by`. Communicates what is Partial.
  nlohmann::json read(double by) const;

 private:
  std::map<std::string, at::Tensor> sums_;
};

// A module that learns: its group, itself, AdamW.
template <class Model>
class Learner {
 public:
  using Make = std::function<std::shared_ptr<Model>()>;
  // `make` gives the same module on all ranks; it is laid out by the plan. With lr 0 there is no optimizer.
  Learner(const std::string& role, const DeviceMesh& mesh, const Make& make, const Plan& plan, double lr, double weight_decay);

  WorkerGroup& group() { return group_; }
  const DeviceMesh& mesh() const { return group_.mesh(); }
  Model& model() { return *model_; }

 protected:
  // Optimizer steps over minibatches of `mine`. `loss(passes, part, counts, sums, epoch, number of the part)` is what is differentiated.
  template <class Loss>
  nlohmann::json learn(const Batch& mine, const Options& o, double lr, int64_t step, Loss loss);

  std::shared_ptr<Model> model_;
  WorkerGroup group_;
};

template <class Model>
class Actor : public Learner<Model> {
 public:
  using typename Learner<Model>::Make;
  Actor(const Options& o, const DeviceMesh& mesh, const Make& make, const Plan& plan = {})
      : Learner<Model>("actor", mesh, make, plan, o.lr, o.weight_decay) {}

  // Adds the column `name`: log-probabilities of the batch's tokens, [batch, time - 1]; and beside "old_logp" the column "sum_squares" of
  // the tokens' probabilities, where advantages are made of it.
  void log_prob(Batch& batch, const Options& o, const std::string& name = "old_logp", int64_t step = -1);
  // Adds "advantages" and, with a critic, "returns", from "scores", "right", "flawed", and "values", "ref_logp", "parts", "greedy_scores"
  // or "sum_squares" where they are used. `kl_beta`: nothing: o.kl_beta.
  void advantages(Batch& batch, const Options& o, int64_t step = -1, std::optional<double> kl_beta = {});
  // Learns. Without a column "old_logp" ratios are to what the first epoch computes, which takes one minibatch. Returns metrics.
  nlohmann::json update(const Batch& batch, const Options& o, int64_t step = -1, std::optional<double> kl_beta = {});
  // Learns the answers as they stand. Returns the mean of -log p.
  double imitate(const Batch& batch, const Options& o, int64_t step = -1);

  static void add_logp(WorkerGroup& group, Model& model, Batch& batch, const Options& o, const std::vector<std::string>& names,
                       int64_t step);

 private:
  std::vector<std::string> columns_for(const Batch& batch) const;
};

// A copy of the actor whose weights stay.
template <class Model>
class Reference : public Learner<Model> {
 public:
  using typename Learner<Model>::Make;
  Reference(const DeviceMesh& mesh, const Make& make, const Plan& plan = {}) : Learner<Model>("reference", mesh, make, plan, 0, 0) {}
  // All ranks of both call it.
  void take_weights(Actor<Model>& actor) { generate::copy_weights(*this->model_, actor.model()); }
  void log_prob(Batch& batch, const Options& o, int64_t step = -1) {
    Actor<Model>::add_logp(this->group_, *this->model_, batch, o, {"ref_logp"}, step);
  }
};

// A model of ids [batch, time] -> values [batch, time] or [batch, time, 1], each before the token after it.
template <class Model>
class Critic : public Learner<Model> {
 public:
  using typename Learner<Model>::Make;
  Critic(const Options& o, const DeviceMesh& mesh, const Make& make, const Plan& plan = {})
      : Learner<Model>("critic", mesh, make, plan, o.critic_lr, o.weight_decay) {}
  void values(Batch& batch, const Options& o, int64_t step = -1);                  // adds "values"
  nlohmann::json update(const Batch& batch, const Options& o, int64_t step = -1);  // learns "returns"
};

// The actor as it generates, on its own mesh or on another.
template <class Model>
class Rollouts {
 public:
  // On the actor's mesh the engine runs the module that trains; on another it has its own, which `make` and `plan` give.
  Rollouts(Actor<Model>& actor, const DeviceMesh& mesh, const typename Actor<Model>::Make& make, const Plan& plan = {},
           const generate::EngineOptions& options = {});
  // The actor has learned: weights of `version` come. All ranks of both call it.
  void update(int64_t version);
  // With a tool by rollout_turns().
  Batch generate(const std::vector<Prompt>& prompts, const RolloutOptions& options, int64_t step = -1, const Tool& tool = {},
                 const TurnOptions& turns = {});
  WorkerGroup& group() { return group_; }

 private:
  const bool is_colocated_;
  std::shared_ptr<Model> copy_;
  WorkerGroup group_;
  std::unique_ptr<HybridEngine<Model>> hybrid_;
  std::unique_ptr<generate::Engine> engine_;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace dtensor::rl

#include <dtensor/rl/roles_learning.hpp>

#pragma GCC visibility pop
