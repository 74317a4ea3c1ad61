// How a Trainer does what trainer.hpp says.
#pragma once

#include <dtensor/base/say.hpp>
#include <dtensor/rl/cut_passes.hpp>
#include <dtensor/rl/trainer.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

namespace detail {

inline constexpr const char* kTrainer = "rl::Trainer";

inline DeviceMesh world_mesh() { return init_device_mesh(c10::kCPU, {World::current().size()}, {"all"}); }

// What f does between methods, of which an error names the trainer's part and the step, as errors of methods do.
template <class F>
decltype(auto) as_method(const char* name, int64_t step, F&& f) {
  try {
    return std::forward<F>(f)();
  } catch (const std::exception& error) {
    const auto reason = reason_of(error);
    if (reason.find(" failed at step ") != std::string::npos) throw;
    fail(kTrainer, "trainer.{} failed at step {}: {}", name, step, reason);
  }
}

// Wider, so that rows of batches can stand below each other.
inline Batch widened(const Batch& batch, int64_t time, int64_t padding) {
  auto result = batch;
  for (const auto* name : {"ids", "mask", "rollout_logp"}) {
    const auto x = batch.get(name);
    const auto more = time - (std::string(name) == "ids" ? 0 : 1) - x.size(1);
    if (more > 0) result.set(name, at::constant_pad_nd(x, {0, more}, std::string(name) == "ids" ? static_cast<double>(padding) : 0.0));
  }
  return result;
}

constexpr std::array kRowLists{"lengths", "prompt_lengths", "prompt_numbers"};

// Rows of a batch with lists of lengths in its meta values.
inline Batch with_lengths(Batch batch, const Rows& rows) {
  for (const auto* name : kRowLists) {
    const auto all = batch.meta().at(name).template get<std::vector<int64_t>>();
    batch.meta()[name] = lengths_at(all, rows);
  }
  return batch;
}
inline Batch rows_of(const Batch& batch, const Rows& rows) { return with_lengths(batch.rows(rows), rows); }

// One batch below the other; groups are numbered anew.
inline Batch stacked(std::vector<Batch> batches, int64_t samples) {
  if (batches.size() == 1) return batches[0];
  int64_t time = 0;
  std::map<std::string, std::vector<int64_t>> lengths;
  for (auto& batch : batches) {
    time = std::max(time, batch.get("ids").size(1));
    for (const auto* name : kRowLists) {
      const auto own = batch.meta().at(name).template get<std::vector<int64_t>>();
      lengths[name].insert(lengths[name].end(), own.begin(), own.end());
      batch.meta().erase(name);
    }
  }
  for (auto& batch : batches) batch = widened(batch, time, 0);
  auto all = concat(batches);
  for (int64_t row = 0; row < all.size(); ++row) lengths["prompt_numbers"][row] = row / samples;
  for (const auto& [name, list] : lengths) all.meta()[name] = list;
  const NoSpmd plain;
  all.set("groups", at::arange(all.size(), at::kLong).div(samples, "floor"));
  return all;
}

}  // namespace detail

template <class Model, class Values>
Trainer<Model, Values>::Trainer(const Options& options, Task task, const Placed<Model, Values>& placed)
    : o_((check_options(options), options)),
      task_(std::move(task)),
      everyone_(detail::world_mesh()),
      actor_(o_, placed.training, placed.actor, placed.plan),
      rollouts_(actor_, placed.generation, placed.actor, placed.plan, task_.engine),
      judge_(placed.training, task_.verifier, {.seconds = o_.verify_seconds, .threads = o_.verify_threads},
             static_cast<int64_t>(task_.kinds.size())),
      kl_beta_(o_.kl_beta),
      algorithm_(o_.algorithm),
      seed_(static_cast<int64_t>(o_.seed)),
      lr_steps_(o_.falling_steps()),
      lr_end_(o_.lr_end) {
  require(task_.prompt && task_.held_out, detail::kTrainer, "the task has no prompts; expected `prompt` and `held_out`");
  require(o_.sft_steps == 0 || task_.example, detail::kTrainer, "'sft_steps' is {}, and the task has no examples", o_.sft_steps);
  require(!o_.has_critic() || placed.critic, detail::kTrainer, "advantage '{}' needs a critic; expected `critic`", o_.advantage);
  require(o_.advantage != "gdpo" || !task_.kinds.empty(), detail::kTrainer,
          "advantage 'gdpo' compares kinds of scores, and the task names none; expected `kinds`");
  require(o_.gdpo_weights.empty() || o_.gdpo_weights.size() == task_.kinds.size(), detail::kTrainer,
          "there are {} 'gdpo_weights', and the task has {} kinds of scores", o_.gdpo_weights.size(), task_.kinds.size());
  if (detail::has_rank(placed.training, World::current().rank())) Passes(placed.training, o_);  // throws for what cannot be cut
  if (o_.has_reference()) reference_.emplace(placed.training, placed.actor, placed.plan);
  if (placed.verdicts) {
    verdicts_.emplace(placed.verdicts_mesh.value_or(placed.generation), placed.verdicts, placed.verdicts_plan, task_.engine,
                      task_.verdicts);
  }
  if (o_.has_critic()) critic_.emplace(o_, placed.critic_mesh.value_or(placed.training), placed.critic, placed.critic_plan);
}

template <class Model, class Values>
at::Tensor Trainer<Model, Values>::whole(const Batch& batch, const std::string& name) const {
  return full_tensor(batch.get(name, everyone_));
}

template <class Model, class Values>
void Trainer<Model, Values>::judge(Batch& batch) {
  if (verdicts_) verdicts_->write(batch, steps_);
  judge_.score(batch, steps_, verdicts_ ? "verdicts" : "texts");
}

template <class Model, class Values>
Batch Trainer<Model, Values>::generate(Metrics& metrics) {
  std::vector<Prompt> prompts;
  for (int64_t i = 0; i < o_.prompts; ++i) prompts.push_back(task_.prompt(next_prompt_++));
  RolloutOptions options{.settings = task_.settings, .samples = o_.samples, .seed = o_.seed, .step = generations_++};
  options.settings.max_tokens = o_.max_tokens;
  options.settings.temperature = o_.temperature;
  options.settings.logprobs_of_sampled = o_.temperature != 1;
  Phases phase(metrics);
  auto batch = phase("gen", [&] { return rollouts_.generate(prompts, options, steps_, task_.tool, task_.turns); });
  if (task_.tool) {
    auto& failed = metrics["reward/failed_tools"];
    failed = (failed.is_number() ? failed.get<int64_t>() : 0) + batch.meta().at("failed_tools").template get<int64_t>();
    batch.meta().erase("failed_tools");
  }
  phase("reward", [&] { judge(batch); });
  if (o_.advantage == "remax") phase("gen_max", [&] { batch.set("greedy_scores", greedy_scores(prompts, options)); });
  return batch;
}

// Of the most probable answer to each prompt, for each of its answers.
template <class Model, class Values>
at::Tensor Trainer<Model, Values>::greedy_scores(const std::vector<Prompt>& prompts, RolloutOptions options) {
  const auto samples = std::exchange(options.samples, 1);
  options.settings.temperature = 0;
  auto greedy = rollouts_.generate(prompts, options, steps_, task_.tool, task_.turns);
  judge(greedy);
  const auto of = [&](const char* name) { return whole(greedy, name); };
  const auto scores = of("scores"), mask = of("mask"), right = of("right"), flawed = of("flawed");
  const NoSpmd plain;
  return shaped_scores(o_, scores, mask, right, flawed).repeat_interleave(samples);
}

// A batch of rollouts with scores; with dynamic sampling of groups that have a signal, and nothing where none has.
template <class Model, class Values>
std::optional<Batch> Trainer<Model, Values>::collect(Metrics& metrics) {
  if (!o_.dynamic_sampling) return generate(metrics);
  std::vector<Batch> kept;
  int64_t rows = 0, all = 0, right = 0, failed = 0;
  const auto wanted = o_.prompts * o_.samples;
  for (int64_t i = 0; i < o_.resamples && rows < wanted; ++i) {
    auto batch = generate(metrics);
    const auto scores = whole(batch, "scores"), groups = whole(batch, "groups"), is_right = whole(batch, "right");
    const auto has_failed = whole(batch, "failed");
    const NoSpmd plain;
    const auto signal = groups_with_signal(scores, groups);
    Rows chosen;
    for (int64_t row = 0; row < batch.size() && rows + static_cast<int64_t>(chosen.size()) < wanted; ++row) {
      if (signal[row].template item<bool>()) chosen.push_back(row);
    }
    all += batch.size();
    right += is_right.sum().template item<int64_t>();
    failed += has_failed.sum().template item<int64_t>();
    rows += static_cast<int64_t>(chosen.size());
    if (!chosen.empty()) kept.push_back(detail::rows_of(batch, chosen));
  }
  metrics["train/num_gen_batches"] = all / wanted;
  metrics["groups/signal"] = rows / o_.samples;
  if (rows > 0) return detail::stacked(std::move(kept), o_.samples);
  require(right > 0, detail::kTrainer,
          "none of {} groups in {} generations has scores that differ, and none of {} answers is right{}; hint: easier prompts, examples "
          "before (sft_steps), scores for parts of an answer, more 'samples'",
          all / o_.samples, o_.resamples, all, failed > 0 ? fmt::format("; the verifier failed for {} of them", failed) : "");
  why_ended_ = fmt::format("{} after {} steps: no group of {} in {} generations has scores that differ, and {} of {} answers are right",
                           right == all ? "task learned" : "nothing left to learn", steps_, all / o_.samples, o_.resamples, right, all);
  return {};
}

template <class Model, class Values>
void Trainer<Model, Values>::learn(Batch& batch, Metrics& metrics) {
  Phases phase(metrics);
  const bool several = o_.minibatches > 1 || o_.shuffle || o_.correction != "none" || advantage_kinds().at(o_.advantage).of_densities;
  if (several || (reference_ && o_.kl_in == "reward")) phase("old_log_prob", [&] { actor_.log_prob(batch, o_, "old_logp", steps_); });
  if (reference_) phase("ref", [&] { reference_->log_prob(batch, o_, steps_); });
  if (critic_) phase("values", [&] { critic_->values(batch, o_, steps_); });
  phase("adv", [&] { actor_.advantages(batch, o_, steps_, kl_beta_); });
  const auto add = [&](const char* role, const nlohmann::json& numbers) {
    for (const auto& [name, value] : numbers.items()) metrics[std::string(role) + "/" + name] = value;
  };
  if (critic_) add("critic", phase("update_critic", [&] { return critic_->update(batch, o_, steps_); }));
  if (steps_ < o_.critic_warmup) return;
  add("actor", phase("update_actor", [&] { return actor_.update(batch, o_, steps_, kl_beta_); }));
  phase("update_weights", [&] { rollouts_.update(steps_ + 1); });
  if (!reference_) return;
  metrics["actor/kl_coef"] = kl_beta_;
  const double kl = o_.kl_in == "loss" ? metrics.at("actor/kl_loss").template get<double>() : batch.meta().at("kl").template get<double>();
  if (o_.kl_in == "reward") metrics["actor/reward_kl_penalty"] = kl;
  if (o_.kl_target == 0) return;
  KlCoefficient coefficient(kl_beta_, o_.kl_target, o_.kl_horizon);
  coefficient.update(kl, static_cast<double>(batch.size()));
  kl_beta_ = coefficient.value();
}

template <class Model, class Values>
void Trainer<Model, Values>::tell(const Batch& batch, Metrics& metrics) const {
  const auto scores = whole(batch, "scores");
  add_statistics(metrics, "critic/score", scores);
  add_statistics(metrics, "critic/rewards", whole(batch, "rewards"));
  const auto mask = whole(batch, "mask"), advantages = whole(batch, "advantages");
  if (!task_.kinds.empty()) {
    const auto parts = whole(batch, "parts").mean(0);
    for (size_t i = 0; i < task_.kinds.size(); ++i)
      metrics["reward/" + task_.kinds[i]] = parts[static_cast<int64_t>(i)].template item<double>();
  }
  for (const auto* name : {"right", "failed", "late"})
    metrics[std::string("reward/") + name] = whole(batch, name).to(at::kDouble).mean().template item<double>();
  const NoSpmd plain;
  add_statistics(metrics, "critic/advantages", advantages.masked_select(mask));
  const auto lengths = mask.sum(1);
  add_statistics(metrics, "response_length", lengths);
  metrics["response_length/clip_ratio"] = 1 - whole(batch, "complete").to(at::kDouble).mean().template item<double>();
  const auto all = batch.meta().at("lengths").template get<std::vector<int64_t>>();
  const auto prompts = batch.meta().at("prompt_lengths").template get<std::vector<int64_t>>();
  add_statistics(metrics, "prompt_length", at::tensor(prompts, at::kLong));
  if (o_.samples > 1) metrics["groups/zero_variance"] = zero_variance_fraction(scores, whole(batch, "groups"));
  const auto tokens = std::accumulate(all.begin(), all.end(), int64_t{0});
  const auto seconds = metrics.at("timing_s/step").template get<double>();
  metrics["perf/total_num_tokens"] = tokens;
  metrics["perf/throughput"] = static_cast<double>(tokens) / seconds;
}

template <class Model, class Values>
Metrics Trainer<Model, Values>::step() {
  Metrics metrics;
  metrics["training/global_step"] = steps_;
  Batch batch;
  why_ended_.clear();
  Phases phase(metrics);
  phase("step", [&] {
    auto collected = detail::as_method("collect", steps_, [&] { return collect(metrics); });
    if (!collected) return;
    batch = std::move(*collected);
    if (o_.may_balance() && o_.minibatches == 1 && !o_.shuffle) {
      const auto lengths = detail::lengths_of(batch);
      const auto order = balanced_order(lengths, detail::ranks_of(rows_over(actor_.mesh())));
      if (order != detail::numbers(0, batch.size())) batch = detail::rows_of(batch, order);
    }
    detail::as_method("learn", steps_, [&] { learn(batch, metrics); });
  });
  if (!why_ended_.empty()) return metrics;
  phase("metrics", [&] { detail::as_method("tell", steps_, [&] { tell(batch, metrics); }); });
  ++steps_;
  return metrics;
}

template <class Model, class Values>
double Trainer<Model, Values>::evaluate() {
  std::vector<Prompt> prompts;
  for (int64_t i = 0; i < o_.eval_prompts; ++i) prompts.push_back(task_.held_out(i));
  RolloutOptions options{.settings = task_.settings};
  options.settings.max_tokens = o_.max_tokens;
  options.settings.temperature = 0;
  auto batch = rollouts_.generate(prompts, options, steps_, task_.tool, task_.turns);
  judge(batch);
  return detail::as_method("evaluate", steps_, [&] { return whole(batch, "right").to(at::kDouble).mean().template item<double>(); });
}

template <class Model, class Values>
void Trainer<Model, Values>::imitate() {
  if (std::exchange(has_imitated_, true)) return;
  for (int64_t step = 0; step < o_.sft_steps; ++step) {
    int64_t time = 2;
    std::vector<std::pair<Prompt, generate::Tokens>> examples;
    for (int64_t i = 0; i < o_.sft_batch; ++i) {
      examples.push_back(task_.example(step * o_.sft_batch + i));
      time = std::max(time, static_cast<int64_t>(examples.back().first.tokens.size() + examples.back().second.size()));
    }
    detail::RolloutRows rows(o_.sft_batch, time, 0);
    for (size_t i = 0; i < examples.size(); ++i) {
      const auto& [prompt, answer] = examples[i];
      generate::Output output;
      output.tokens = answer;
      output.logprobs.resize(answer.size());
      rows.add(static_cast<int64_t>(i), 0, 0, prompt, output);
    }
    actor_.imitate(rows.batch(at::kFloat), o_, step);
  }
  if (o_.sft_steps > 0) rollouts_.update(0);
}

template <class Model, class Values>
State Trainer<Model, Values>::state() {
  State state{{"actor", actor_.model()},
              {"actor_optimizer", *actor_.group().optimizer()},
              {"steps", steps_},
              {"next_prompt", next_prompt_},
              {"generations", generations_},
              {"kl_beta", kl_beta_},
              {"algorithm", algorithm_},
              {"seed", seed_},
              {"lr_end", lr_end_},
              {"lr_steps", lr_steps_}};
  if (reference_) state.add({"reference", reference_->model()});
  if (critic_) {
    state.add({"critic", critic_->model()});
    state.add({"critic_optimizer", *critic_->group().optimizer()});
  }
  return state;
}

// What was read says the run is one of these options.
template <class Model, class Values>
void Trainer<Model, Values>::check_resumed() const {
  require(algorithm_ == o_.algorithm && seed_ == static_cast<int64_t>(o_.seed), detail::kTrainer,
          "the run in '{}' has algorithm '{}' and seed {}, and got algorithm '{}' and seed {}; expected the same; hint: another folder, or "
          "no resume, for another run",
          o_.save, algorithm_, static_cast<uint64_t>(seed_), o_.algorithm, o_.seed);
  require(lr_end_ == o_.lr_end && (o_.lr_end == 1 || lr_steps_ == o_.falling_steps()), detail::kTrainer,
          "the run in '{}' has learning rates that fall to {:g} within {} steps, and these fall to {:g} within {}; expected the same; "
          "hint: lr_end {:g} and lr_steps {}",
          o_.save, lr_end_, lr_steps_, o_.lr_end, o_.falling_steps(), lr_end_, lr_steps_);
}

template <class Model, class Values>
bool Trainer<Model, Values>::run(const std::function<void(const Metrics&)>& told) {
  std::optional<CheckpointManager> manager;
  if (!o_.save.empty()) manager.emplace(state(), o_.save, ManagerOptions{.every_steps = o_.save_every});
  const bool goes_on = o_.resume && manager->resume();
  if (goes_on) {
    check_resumed();
    rollouts_.update(steps_);
  } else {
    if (o_.resume && World::current().rank() == 0) dtensor::detail::say("rl: '{}' has no checkpoint; the run begins anew\n", o_.save);
    imitate();
    if (reference_) reference_->take_weights(actor_);
  }
  const bool writes = World::current().rank() == 0;
  JsonLines log(writes ? o_.log : "", steps_);
  EventFile events(writes ? o_.tensorboard : "", steps_);
  while (steps_ < o_.steps) {
    auto metrics = step();
    if (!why_ended_.empty()) break;
    if (o_.eval_every > 0 && steps_ % o_.eval_every == 0) metrics["val-core/acc/mean@1"] = evaluate();
    log.add(metrics);
    events.add(metrics);
    if (told) told(metrics);
    if (manager && !manager->step(steps_)) return false;
  }
  if (manager) {
    manager->save(steps_);
    manager->finish();
  }
  return true;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
