// How the roles of roles.hpp do what they do.
#pragma once

#include <dtensor/rl/roles.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

inline void Sums::add(const std::string& name, const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  const auto value = x.detach().to(at::kDouble);
  const auto found = sums_.find(name);
  if (found == sums_.end()) sums_.emplace(name, value);
  else found->second = found->second + value;
}

inline nlohmann::json Sums::read(double by) const {
  auto read = nlohmann::json::object();
  for (const auto& [name, sum] : sums_) read[name] = full_tensor(sum).item<double>() / by;
  return read;
}

namespace detail {

inline std::vector<int64_t> lengths_of(const Batch& batch) { return batch.meta().at("lengths").get<std::vector<int64_t>>(); }

// Without prompts in a batch that has none.
inline RowPrompts prompts_of(const Batch& batch) {
  const auto list = [&](const char* name) { return batch.meta().value(name, std::vector<int64_t>{}); };
  return {lengths_of(batch), list("prompt_lengths"), list("prompt_numbers")};
}

// A part's column as it lies on this rank, as wide as the batch.
inline at::Tensor own_rows(const at::Tensor& x, int64_t time) {
  const NoSpmd plain;
  const auto local = is_dtensor(x) ? DTensor(x).to_local() : x;
  return at::constant_pad_nd(local, {0, time - local.size(1)});
}

inline Mode own_rows_mode() {
  auto mode = dp_compute();
  mode.own_results = true;
  return mode;
}

// What f says of each token of a part, as columns of these names.
template <class F>
void add_columns(WorkerGroup& group, Batch& batch, const Options& o, const std::string& method, const std::vector<std::string>& names,
                 int64_t step, F f) {
  const auto prompts = prompts_of(batch);
  batch.merge(group.run({method, names, own_rows_mode(), step}, batch.select({"ids", "mask"}), [&](const Batch& mine) {
    const at::NoGradGuard no_grad;
    const auto time = mine.get("mask").size(1);
    const Passes passes(group.mesh(), o);
    std::vector<std::vector<at::Tensor>> own(names.size());
    for (const auto& part : parts_of(mine, prompts, o.microbatch_tokens)) {
      const std::vector<at::Tensor> columns = f(passes, part);
      for (size_t i = 0; i < names.size(); ++i) own[i].push_back(own_rows(columns[i], time));
    }
    const NoSpmd plain;
    Batch results;
    for (size_t i = 0; i < names.size(); ++i) results.set(names[i], own[i].size() == 1 ? own[i][0] : at::cat(own[i]));
    return results;
  }));
}

}  // namespace detail

template <class Model>
Learner<Model>::Learner(const std::string& role, const DeviceMesh& mesh, const Make& make, const Plan& plan, double lr, double weight_decay)
    : group_(
          role, mesh, [&] { return model_ = make(); }, plan) {
  const auto options = torch::optim::AdamWOptions(lr).betas({0.9, 0.95}).weight_decay(weight_decay);
  if (lr > 0) group_.set_optimizer(std::make_shared<optim::FusedAdamW>(model_->parameters(), options));
}

template <class Model>
template <class Loss>
nlohmann::json Learner<Model>::learn(const Batch& mine, const Options& o, double lr, int64_t step, Loss loss) {
  auto& optimizer = *group_.optimizer();
  const auto prompts = detail::prompts_of(mine);
  const auto& lengths = prompts.lengths;
  const Passes passes(group_.mesh(), o);
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
  Sums sums;
  double norms = 0;
  const auto of_epoch = std::min(o.minibatches, mine.size());
  for (int64_t epoch = 0; epoch < o.epochs; ++epoch) {
    const auto seed = request_seed(o.seed, step, -1 - epoch);
    const auto minibatches = minibatch_rows(mine.size(), of_epoch, o.shuffle, seed);
    for (auto rows : minibatches) {
      const bool all = of_epoch == 1 && !o.shuffle;
      if (!all && o.may_balance()) {  // not before: on other ranks minibatches would have other rows
        Rows ordered;
        for (const auto i : balanced_order(detail::lengths_at(lengths, rows), detail::ranks_of(mine.layout()))) ordered.push_back(rows[i]);
        rows = ordered;
      }
      const auto minibatch = all ? mine : mine.rows(rows);
      const auto counts = count(minibatch.get("mask"));
      require(counts.tokens > 0, "rl::Learner", "a minibatch of {} answers has no token to learn from", rows.size());
      optimizer.zero_grad();
      const auto parts = parts_of(minibatch, detail::prompts_at(prompts, rows), o.microbatch_tokens);
      for (size_t i = 0; i < parts.size(); ++i) loss(passes, parts[i], counts, sums, epoch, i).backward();
      const auto norm = clip_grad_norm_(model_->parameters(), o.grad_clip);
      require(std::isfinite(norm), "rl::Learner", "the gradients' norm is {}", norm);
      norms += norm;
      optimizer.step();
    }
  }
  const auto updates = static_cast<double>(o.epochs * of_epoch);
  auto metrics = sums.read(updates);
  metrics["grad_norm"] = norms / updates;
  metrics["lr"] = lr;
  return metrics;
}

namespace detail {
// A learning rate at a step: rising, then falling.
inline double lr_at(const Options& o, double lr, int64_t step) {
  const auto share = [](int64_t part, int64_t whole) { return static_cast<double>(part) / static_cast<double>(whole); };
  const auto end = o.falling_steps();
  const auto fallen = 1 - (1 - o.lr_end) * share(std::clamp<int64_t>(step, 0, end), end);
  return lr * fallen * (o.warmup > step + 1 ? share(step + 1, o.warmup) : 1);
}
}  // namespace detail

template <class Model>
void Actor<Model>::add_logp(WorkerGroup& group, Model& model, Batch& batch, const Options& o, const std::vector<std::string>& names,
                            int64_t step) {
  const bool squares = names.size() > 1;
  detail::add_columns(group, batch, o, "log_prob", names, step, [&](const Passes& passes, const Part& part) {
    const auto forward = [&](const at::Tensor& ids) { return model.forward(ids); };
    const auto found = passes.score(forward, part, {.temperature = o.temperature, .sum_squares = squares});
    return squares ? std::vector<at::Tensor>{found.logp, found.sum_squares} : std::vector<at::Tensor>{found.logp};
  });
}

template <class Model>
void Actor<Model>::log_prob(Batch& batch, const Options& o, const std::string& name, int64_t step) {
  const bool squares = name == "old_logp" && advantage_kinds().at(o.advantage).of_densities;
  add_logp(this->group_, *this->model_, batch, o, squares ? std::vector<std::string>{name, "sum_squares"} : std::vector<std::string>{name},
           step);
}

template <class Model>
std::vector<std::string> Actor<Model>::columns_for(const Batch& batch) const {
  std::vector<std::string> names{"ids", "mask"};
  for (const auto* name : {"advantages", "old_logp", "ref_logp", "rollout_logp", "right"}) {
    if (batch.has(name)) names.emplace_back(name);
  }
  return names;
}

namespace detail {

// What advantages are computed from.
inline std::vector<std::string> advantage_columns(const Options& o) {
  std::vector<std::string> names{"scores", "right", "flawed", "groups", "mask", "rollout_logp"};
  const bool penalized = o.has_reference() && o.kl_in == "reward";
  const bool densities = advantage_kinds().at(o.advantage).of_densities;
  if (o.has_critic()) names.emplace_back("values");
  if (o.advantage == "remax") names.emplace_back("greedy_scores");
  if (o.advantage == "gdpo") names.emplace_back("parts");
  if (densities) names.emplace_back("sum_squares");
  if (penalized || densities) names.emplace_back("old_logp");
  if (penalized) names.emplace_back("ref_logp");
  return names;
}

inline AdvantageTerms advantage_terms(const Options& o, const Batch& mine) {
  const auto mask = mine.get("mask"), rollout_logp = mine.get("rollout_logp");
  const auto dtype = rollout_logp.scalar_type();
  AdvantageTerms terms{.groups = mine.get("groups"), .mask = mask};
  terms.scores = shaped_scores(o, mine.get("scores").to(dtype), mask, mine.get("right"), mine.get("flawed"));
  terms.rewards = at_last_token(terms.scores, mask);
  if (o.has_critic()) terms.values = mine.get("values");
  if (mine.has("greedy_scores")) terms.greedy_scores = mine.get("greedy_scores").to(dtype);
  if (mine.has("parts")) terms.parts = mine.get("parts").to(dtype);
  if (!mine.has("sum_squares")) return terms;
  terms.logp = mine.get("old_logp"), terms.sum_squares = mine.get("sum_squares");
  terms.weights = correction_weights(o, terms.logp, rollout_logp, mask);
  return terms;
}

}  // namespace detail

template <class Model>
void Actor<Model>::advantages(Batch& batch, const Options& o, int64_t step, std::optional<double> kl_beta) {
  const bool penalized = o.has_reference() && o.kl_in == "reward";
  std::vector<std::string> gives{"advantages", "rewards"};
  if (o.has_critic()) gives.emplace_back("returns");
  const Method method{"advantages", gives, dp_compute(), step};
  batch.merge(this->group_.run(method, batch.select(detail::advantage_columns(o)), [&](const Batch& mine) {
    const at::NoGradGuard no_grad;
    auto terms = detail::advantage_terms(o, mine);
    Batch results;
    if (penalized) {
      const auto kl = kl_estimate(mine.get("old_logp"), mine.get("ref_logp"), kl_by(o));
      terms.rewards = rewards_with_kl(terms.rewards, kl, terms.mask, kl_beta.value_or(o.kl_beta));
      results.meta()["kl"] = mean_kl(kl, terms.mask, count(terms.mask));
    }
    const auto [advantages, returns] = advantages_by(o, terms);
    results.set("advantages", advantages);
    results.set("rewards", scores_of(terms.rewards, terms.mask));
    if (o.has_critic()) results.set("returns", returns);
    return results;
  }));
}

template <class Model>
nlohmann::json Actor<Model>::update(const Batch& batch, const Options& o, int64_t step, std::optional<double> kl_beta) {
  require(batch.has("old_logp") || (o.minibatches == 1 && !o.shuffle), "rl::Actor",
          "the batch has no 'old_logp', and {} minibatches; hint: call log_prob() before", o.minibatches);
  const bool in_loss = o.has_reference() && o.kl_in == "loss";
  std::vector<at::Tensor> first;  // of the first epoch's parts
  const auto loss = [&](const Passes& passes, const Part& part, const Counts& counts, Sums& sums, int64_t epoch, size_t i) {
    const auto by = normalization_by(o, counts);
    const auto [logp, entropy, squares] = passes.score([&](const at::Tensor& ids) { return this->model_->forward(ids); }, part,
                                                       {.temperature = o.temperature, .entropy = true, .check = false});
    const auto mask = part.tokens("mask");
    if (epoch == 0 && !batch.has("old_logp")) first.push_back(logp.detach());
    const auto old_logp = batch.has("old_logp") ? part.tokens("old_logp") : first.at(i);
    PolicyTerms terms{.logp = logp, .old_logp = old_logp, .advantages = part.tokens("advantages"), .mask = mask};
    terms.weights = correction_weights(o, terms.old_logp, part.tokens("rollout_logp"), mask);
    const auto policy = policy_loss_by(o, terms, by, request_seed(o.seed, step, epoch));
    auto total = policy.loss;
    const auto entropies = aggregate(entropy, mask, by);
    if (o.entropy_bonus > 0) total = total - entropies * o.entropy_bonus;
    if (in_loss) {
      const auto kl = aggregate(kl_estimate(logp, part.tokens("ref_logp"), kl_by(o)), mask, by);
      total = total + kl * kl_beta.value_or(o.kl_beta);
      sums.add("kl_loss", kl);
    }
    if (o.nll_weight > 0) {
      const auto right = positive_mask(mask, part.batch.get("right"));
      total = total + positive_nll(logp, right, counts) * o.nll_weight;
    }
    sums.add("pg_loss", policy.loss);
    sums.add("entropy", entropies);
    sums.add("pg_clipfrac", policy.metrics.clip_fraction);
    sums.add("pg_clipfrac_lower", policy.metrics.clip_fraction_lower);
    sums.add("ppo_kl", policy.metrics.approx_kl);
    return total;
  };
  const auto result = this->group_.run({"update", {}, dp_compute(), step}, batch.select(columns_for(batch)), [&](const Batch& mine) {
    Batch told;
    told.meta() = {{"actor", this->learn(mine, o, detail::lr_at(o, o.lr, step), step, loss)}};
    return told;
  });
  return result.meta().at("actor");
}

template <class Model>
double Actor<Model>::imitate(const Batch& batch, const Options& o, int64_t step) {
  auto once = o;
  once.epochs = once.minibatches = 1;
  const auto loss = [&](const Passes& passes, const Part& part, const Counts& counts, Sums& sums, int64_t, size_t) {
    const auto logp = passes.score([&](const at::Tensor& ids) { return this->model_->forward(ids); }, part, {.check = false}).logp;
    const auto value = sft_loss(logp, part.tokens("mask"), {counts});
    sums.add("loss", value);
    return value;
  };
  const auto result = this->group_.run({"imitate", {}, dp_compute(), step}, batch.select({"ids", "mask"}), [&](const Batch& mine) {
    Batch told;
    told.meta() = {{"sft", this->learn(mine, once, o.sft_lr, step, loss)}};
    return told;
  });
  return result.meta().at("sft").at("loss");
}

template <class Model>
void Critic<Model>::values(Batch& batch, const Options& o, int64_t step) {
  detail::add_columns(this->group_, batch, o, "values", {"values"}, step, [&](const Passes& passes, const Part& part) {
    return std::vector<at::Tensor>{passes.values([&](const at::Tensor& ids) { return this->model_->forward(ids); }, part)};
  });
}

template <class Model>
nlohmann::json Critic<Model>::update(const Batch& batch, const Options& o, int64_t step) {
  const auto loss = [&](const Passes& passes, const Part& part, const Counts& counts, Sums& sums, int64_t, size_t) {
    const auto values = passes.values([&](const at::Tensor& ids) { return this->model_->forward(ids); }, part);
    const auto found = value_loss(values, part.tokens("values"), part.tokens("returns"), part.tokens("mask"), {counts}, o.value_clip);
    sums.add("vf_loss", found.loss);
    sums.add("vf_clipfrac", found.clip_fraction);
    sums.add("vpred_mean", aggregate(values, part.tokens("mask"), {counts}));
    return found.loss;
  };
  const Method method{"update", {}, dp_compute(), step};
  const auto result = this->group_.run(method, batch.select({"ids", "mask", "values", "returns"}), [&](const Batch& mine) {
    Batch told;
    told.meta() = {{"critic", this->learn(mine, o, detail::lr_at(o, o.critic_lr, step), step, loss)}};
    return told;
  });
  return result.meta().at("critic");
}

template <class Model>
Rollouts<Model>::Rollouts(Actor<Model>& actor, const DeviceMesh& mesh, const typename Actor<Model>::Make& make, const Plan& plan,
                          const generate::EngineOptions& options)
    : is_colocated_(mesh == actor.mesh()),
      group_(is_colocated_ ? WorkerGroup("rollout", mesh)
                           : WorkerGroup(
                                 "rollout", mesh, [&] { return copy_ = make(); }, plan)) {
  for (const auto& p : actor.model().parameters()) dtype_ = p.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (is_colocated_) {
    if (mesh.contains_this_rank()) engine_ = on(mesh, [&] { return std::make_unique<generate::Engine>(actor.model(), options); });
  } else {
    hybrid_ = std::make_unique<HybridEngine<Model>>(actor.model(), group_, *copy_, HybridOptions{.engine = options});
  }
}

template <class Model>
void Rollouts<Model>::update(int64_t version) {
  if (hybrid_) hybrid_->update(version);
  if (engine_) engine_->load_weights(version);
}

template <class Model>
Batch Rollouts<Model>::generate(const std::vector<Prompt>& prompts, const RolloutOptions& options, int64_t step, const Tool& tool,
                                const TurnOptions& turns) {
  return group_.run({"generate", rollout_columns(), dp_compute(), step}, Batch(), [&](const Batch&) {
    auto& engine = engine_ ? *engine_ : hybrid_->engine();
    return tool ? rollout_turns(engine, prompts, tool, options, turns, dtype_) : rollout(engine, prompts, options, dtype_);
  });
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
