// What a Trainer is told: an algorithm by name, and whatever differs from it.
//
//   auto options = rl::read_options({{"algorithm", "dapo"}, {"prompts", 64}, {"lr", 1e-6}});
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/rl/option_tables.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct Options {
  std::string algorithm = "grpo";
  std::string advantage = "grpo", loss = "ppo", aggregation = "token_mean";

  int64_t sft_steps = 0, sft_batch = 128;
  double sft_lr = 1e-3;
  int64_t steps = 100, prompts = 32, samples = 8, epochs = 1, minibatches = 1, microbatch_tokens = 0;
  bool shuffle = false, pack = false, share_prompts = false, balance = true;
  std::string cp_method = "ring", cp_order = "zigzag";
  uint64_t seed = 0;

  double lr = 1e-3, critic_lr = 1e-3, weight_decay = 0.01, grad_clip = 1, lr_end = 1;
  int64_t lr_steps = 0, warmup = 0, critic_warmup = 0;

  double clip_low = 0.2, clip_high = 0.2, dual_clip = 3, value_clip = 0.5, entropy_bonus = 0, nll_weight = 0;
  double sapo_tau = 1, sapo_tau_negative = 1.05, dro_beta = 0.1, dppo_max_ratio = 20;
  std::string dppo_divergence = "total_variation";
  double cov_share = 2e-4, clip_cov_least = 1, clip_cov_most = 5, kl_cov_weight = 1;
  double gamma = 1, lambda = 1, critic_lambda = -1, length_alpha = 0, length_least_lambda = 0;
  std::vector<double> gdpo_weights{};
  std::string kl = "none", kl_in = "loss", correction = "none";
  double kl_beta = 0.001, kl_target = 0, kl_horizon = 10000, correction_upper = 2;

  bool dynamic_sampling = false;
  int64_t resamples = 10, overlong_buffer = 0;
  double overlong_penalty = 1, flawed_penalty = 0;

  int64_t max_tokens = 128;
  double temperature = 1, verify_seconds = 10;
  int64_t verify_threads = 1;

  int64_t eval_every = 0, eval_prompts = 512;
  std::string save, log, tensorboard;
  int64_t save_every = 0;
  bool resume = false;

  // The roles that the algorithm needs.
  bool has_critic() const { return advantage == "gae"; }
  bool has_reference() const { return kl != "none"; }
  // Within so many the learning rates fall.
  int64_t falling_steps() const { return lr_steps > 0 ? lr_steps : steps; }
  // Whether rows may change their order: not where a loss chooses tokens by their place.
  bool may_balance() const { return balance && !loss_kinds().at(loss).of_whole; }
};

// Each field: its name, itself, and what it is for. JSON objects and command lines are read by this list.
template <class O, class F>
void for_each_option(O& o, F f);

// An object with names of options. Throws, naming what there is, for an algorithm and names that there are not, for values of another type,
// and as check_options() does.
Options read_options(const nlohmann::json& given);
nlohmann::json to_json(const Options& options);

// Throws for values that make no sense, alone or together.
void check_options(const Options& options);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kOptions = "rl::Options";

inline void check_name(const char* option, const std::string& value, const Names& names) {
  if (!std::ranges::count(names, value)) fail(kOptions, "'{}' is '{}'; expected one of {}", option, value, names);
}

}  // namespace detail

namespace detail {

inline std::string one_of(const Names& names) { return fmt::format("{}", fmt::join(names, ", ")); }

template <class O, class F>
void for_each_term_of_losses(O& o, F& f) {
  f("clip_low", o.clip_low, "of ratios, below 1");
  f("clip_high", o.clip_high, "of ratios, above 1");
  f("dual_clip", o.dual_clip, "of ratios where the advantage is negative; 0: none");
  f("value_clip", o.value_clip, "of the critic's values; 0: none");
  f("entropy_bonus", o.entropy_bonus, "weight of the entropy in the loss");
  f("nll_weight", o.nll_weight, "weight of -log p of right answers in the loss (VAPO)");
  f("sapo_tau", o.sapo_tau, "of loss sapo, where the advantage is positive");
  f("sapo_tau_negative", o.sapo_tau_negative, "and where it is not");
  f("dro_beta", o.dro_beta, "of loss dro: the pull back to the old policy");
  f("dppo_divergence", o.dppo_divergence, one_of(kDppoDivergences).c_str());
  f("dppo_max_ratio", o.dppo_max_ratio, "of loss dppo, whose bounds are clip_low and clip_high");
  f("cov_share", o.cov_share, "of the tokens that losses clip_cov and kl_cov choose");
  f("clip_cov_least", o.clip_cov_least, "covariance that loss clip_cov chooses");
  f("clip_cov_most", o.clip_cov_most, "covariance that loss clip_cov chooses");
  f("kl_cov_weight", o.kl_cov_weight, "of |log ratio| at the tokens that loss kl_cov chooses");
  f("gamma", o.gamma, "discount of rewards");
  f("lambda", o.lambda, "of generalized advantage estimation");
  f("critic_lambda", o.critic_lambda, "lambda of the returns; below 0: the same");
  f("length_alpha", o.length_alpha, "above 0: lambda = 1 - 1 / (length_alpha length) (VAPO)");
  f("length_least_lambda", o.length_least_lambda, "the least lambda that length_alpha gives");
  f("gdpo_weights", o.gdpo_weights, "of the kinds of scores (GDPO); none: 1 each");
  f("kl", o.kl, ("estimate of the divergence from the first weights: " + one_of(kKls)).c_str());
  f("kl_in", o.kl_in, "loss or reward");
  f("kl_beta", o.kl_beta, "coefficient of the divergence");
  f("kl_target", o.kl_target, "above 0: the coefficient follows the divergence");
  f("kl_horizon", o.kl_horizon, "answers in which it does");
  f("correction", o.correction, "importance weights for what the rollouts' kernels drew: none, token, sequence");
  f("correction_upper", o.correction_upper, "largest importance weight");
}

}  // namespace detail

template <class O, class F>
void for_each_option(O& o, F f) {
  f("algorithm", o.algorithm,
    ("whose values all other options have unless they are given: " + detail::one_of(detail::names_of(algorithms()))).c_str());
  f("advantage", o.advantage, detail::one_of(detail::names_of(advantage_kinds())).c_str());
  f("loss", o.loss, detail::one_of(detail::names_of(loss_kinds())).c_str());
  f("aggregation", o.aggregation, detail::one_of(detail::kAggregations).c_str());
  f("sft_steps", o.sft_steps, "optimizer steps on examples, before the first rollout");
  f("sft_batch", o.sft_batch, "examples in such a step");
  f("sft_lr", o.sft_lr, "learning rate of these");
  f("steps", o.steps, "batches of rollouts");
  f("prompts", o.prompts, "in a batch");
  f("samples", o.samples, "answers to a prompt");
  f("epochs", o.epochs, "times that a batch is learned from");
  f("minibatches", o.minibatches, "optimizer steps in an epoch");
  f("microbatch_tokens", o.microbatch_tokens, "tokens that a rank passes through a model at a time; 0: all");
  f("shuffle", o.shuffle, "minibatches have other rows in each epoch");
  f("pack", o.pack, "rows without padding");
  f("share_prompts", o.share_prompts, "rows without padding, and a prompt goes through the model once for all its answers on a rank");
  f("cp_method", o.cp_method, "of attention where the training mesh cuts positions over cp: ring, ulysses, usp, doublering, ...");
  f("cp_order", o.cp_order, "of positions there: contiguous, zigzag, stripes");
  f("balance", o.balance, "ranks get rows of equal work; losses that choose tokens keep their order");
  f("seed", o.seed, "of prompts, rollouts and minibatches");
  f("lr", o.lr, "learning rate of the actor");
  f("critic_lr", o.critic_lr, "learning rate of the critic");
  f("weight_decay", o.weight_decay, "of AdamW");
  f("grad_clip", o.grad_clip, "largest norm of the gradients");
  f("lr_end", o.lr_end, "share of the learning rates that is left at the end; they fall evenly");
  f("lr_steps", o.lr_steps, "steps within which they fall; 0: steps");
  f("warmup", o.warmup, "steps in which the learning rate rises");
  f("critic_warmup", o.critic_warmup, "first steps in which only the critic learns");
  detail::for_each_term_of_losses(o, f);
  f("dynamic_sampling", o.dynamic_sampling, "only groups whose scores differ, and more prompts in place of others (DAPO)");
  f("resamples", o.resamples, "generations for a batch, at most; then it has the groups that there are");
  f("overlong_buffer", o.overlong_buffer, "last tokens of max_tokens that are punished; 0: none (DAPO)");
  f("overlong_penalty", o.overlong_penalty, "for an answer of max_tokens");
  f("flawed_penalty", o.flawed_penalty, "for right answers that a verifier calls flawed (FAPO)");
  f("max_tokens", o.max_tokens, "of an answer");
  f("temperature", o.temperature, "of rollouts, and of the log-probabilities that are learned");
  f("verify_seconds", o.verify_seconds, "for a verifier and an answer");
  f("verify_threads", o.verify_threads, "of a rank");
  f("eval_every", o.eval_every, "steps between evaluations in the run; 0: none");
  f("eval_prompts", o.eval_prompts, "held-out prompts");
  f("save", o.save, "a folder for checkpoints");
  f("save_every", o.save_every, "steps between checkpoints; 0: after the last");
  f("resume", o.resume, "go on from the newest checkpoint in the folder of `save`");
  f("log", o.log, "a file for metrics, a JSON object a step");
  f("tensorboard", o.tensorboard, "a folder for metrics as event files of TensorBoard");
}

namespace detail {

inline const char* type_for(const std::string&) { return "a text"; }
inline const char* type_for(bool) { return "true or false"; }
inline const char* type_for(double) { return "a number"; }
inline const char* type_for(int64_t) { return "a whole number"; }
inline const char* type_for(uint64_t) { return "a whole number, 0 or more"; }
inline const char* type_for(const std::vector<double>&) { return "a list of numbers"; }

inline bool fits(const nlohmann::json& value, const std::string&) { return value.is_string(); }
inline bool fits(const nlohmann::json& value, bool) { return value.is_boolean(); }
inline bool fits(const nlohmann::json& value, double) { return value.is_number(); }
inline bool fits(const nlohmann::json& value, int64_t) { return value.is_number_integer(); }
inline bool fits(const nlohmann::json& value, const std::vector<double>&) {
  return value.is_array() && std::ranges::all_of(value, [](const nlohmann::json& item) { return item.is_number(); });
}
inline bool fits(const nlohmann::json& value, uint64_t) {
  return value.is_number_unsigned() || (value.is_number_integer() && value.get<int64_t>() >= 0);  // `value >= 0` compiles for half a second
}

inline void take_options(Options& options, const nlohmann::json& given) {
  std::vector<std::string> known;
  for_each_option(options, [&](const char* name, auto& field, const char*) {
    known.emplace_back(name);
    if (!given.contains(name)) return;
    require(fits(given.at(name), field), kOptions, "'{}' is {}; expected {}", name, given.at(name).dump(), type_for(field));
    given.at(name).get_to(field);
  });
  for (const auto& [name, value] : given.items()) {
    if (!std::ranges::count(known, name)) fail(kOptions, "there is no option '{}'; got {}", name, known);
  }
}

inline void check_numbers(const Options& o) {
  const auto least = [](const char* name, auto value, auto bound) {
    require(value >= bound, kOptions, "'{}' is {}; expected {} or more", name, value, bound);
  };
  for_each_option(o, []<class T>(const char* name, const T& value, const char*) {
    if constexpr (std::is_same_v<T, double>) require(std::isfinite(value), kOptions, "'{}' is {}; expected a finite number", name, value);
  });
  const std::vector<std::pair<const char*, int64_t>> counts{
      {"steps", o.steps},           {"prompts", o.prompts},           {"samples", o.samples},
      {"epochs", o.epochs},         {"minibatches", o.minibatches},   {"resamples", o.resamples},
      {"max_tokens", o.max_tokens}, {"eval_prompts", o.eval_prompts}, {"verify_threads", o.verify_threads},
      {"sft_batch", o.sft_batch}};
  for (const auto& [name, value] : counts) least(name, value, 1);
  const std::vector<std::pair<const char*, double>> amounts{{"lr", o.lr},
                                                            {"critic_lr", o.critic_lr},
                                                            {"lr_end", o.lr_end},
                                                            {"kl_beta", o.kl_beta},
                                                            {"entropy_bonus", o.entropy_bonus},
                                                            {"nll_weight", o.nll_weight},
                                                            {"length_alpha", o.length_alpha},
                                                            {"flawed_penalty", o.flawed_penalty},
                                                            {"overlong_penalty", o.overlong_penalty},
                                                            {"microbatch_tokens", static_cast<double>(o.microbatch_tokens)},
                                                            {"overlong_buffer", static_cast<double>(o.overlong_buffer)},
                                                            {"critic_warmup", static_cast<double>(o.critic_warmup)},
                                                            {"dro_beta", o.dro_beta},
                                                            {"kl_cov_weight", o.kl_cov_weight},
                                                            {"clip_low", o.clip_low},
                                                            {"clip_high", o.clip_high},
                                                            {"value_clip", o.value_clip},
                                                            {"weight_decay", o.weight_decay},
                                                            {"kl_target", o.kl_target},
                                                            {"sft_lr", o.sft_lr},
                                                            {"sft_steps", static_cast<double>(o.sft_steps)},
                                                            {"eval_every", static_cast<double>(o.eval_every)},
                                                            {"save_every", static_cast<double>(o.save_every)},
                                                            {"lr_steps", static_cast<double>(o.lr_steps)},
                                                            {"warmup", static_cast<double>(o.warmup)}};
  for (const auto& [name, value] : amounts) least(name, value, 0.0);
  const std::vector<std::pair<const char*, double>> shares{
      {"gamma", o.gamma}, {"lambda", o.lambda}, {"critic_lambda", std::max(o.critic_lambda, 0.0)},
      {"length_least_lambda", o.length_least_lambda}};
  for (const auto& [name, value] : shares) require(value >= 0 && value <= 1, kOptions, "'{}' is {}; expected 0 to 1", name, value);
  const std::vector<std::pair<const char*, double>> positive{{"sapo_tau", o.sapo_tau},
                                                             {"sapo_tau_negative", o.sapo_tau_negative},
                                                             {"dppo_max_ratio", o.dppo_max_ratio},
                                                             {"correction_upper", o.correction_upper},
                                                             {"kl_horizon", o.kl_horizon},
                                                             {"grad_clip", o.grad_clip},
                                                             {"verify_seconds", o.verify_seconds}};
  for (const auto& [name, value] : positive) require(value > 0, kOptions, "'{}' is {}; expected a positive number", name, value);
  require(o.dual_clip == 0 || o.dual_clip > 1, kOptions, "'dual_clip' is {}; expected a number above 1, or 0 for none", o.dual_clip);
  require(o.temperature > 0, kOptions, "'temperature' is {}; expected a positive number, since rollouts have to differ", o.temperature);
  require(o.minibatches <= o.prompts * o.samples, kOptions, "'minibatches' is {}; expected at most the {} answers of a batch",
          o.minibatches, o.prompts * o.samples);
  require(o.overlong_buffer <= o.max_tokens, kOptions, "'overlong_buffer' is {}; expected at most max_tokens, {}", o.overlong_buffer,
          o.max_tokens);
}

}  // namespace detail

namespace detail {

inline void check_names(const Options& o) {
  check_name("algorithm", o.algorithm, names_of(algorithms()));
  check_name("advantage", o.advantage, names_of(advantage_kinds()));
  check_name("loss", o.loss, names_of(loss_kinds()));
  check_name("aggregation", o.aggregation, kAggregations);
  check_name("dppo_divergence", o.dppo_divergence, kDppoDivergences);
  check_name("kl", o.kl, kKls);
  check_name("kl_in", o.kl_in, {"loss", "reward"});
  check_name("correction", o.correction, {"none", "token", "sequence"});
  check_name("cp_order", o.cp_order, {"contiguous", "zigzag", "stripes"});
}

inline void check_advantage(const Options& o) {
  const auto& kind = advantage_kinds().at(o.advantage);
  require(!kind.of_groups || o.samples > 1, kOptions,
          "advantage '{}' compares the answers to a prompt, and 'samples' is {}; expected 2 or more; hint: "
          "advantage gae, remax or reinforce_plus_plus",
          o.advantage, o.samples);
  require(!o.dynamic_sampling || o.samples > 1, kOptions,
          "'dynamic_sampling' keeps groups whose scores differ, and 'samples' is 1; expected 2 or more");
  require(o.kl != "k1" || o.kl_in == "reward", kOptions,
          "kl 'k1' in the loss has no gradient on average; expected k2, or k1_through, or kl_in 'reward'");
  require(o.kl == "none" || o.kl_in == "loss" || kind.of_rewards, kOptions,
          "kl_in 'reward' makes rewards of tokens, and advantage '{}' compares scores of answers; expected kl_in 'loss', or advantage gae, "
          "remax, reinforce_plus_plus or optimal_token_baseline",
          o.advantage);
  require(o.kl_target == 0 || o.kl != "none", kOptions, "'kl_target' is {}, and 'kl' is none; expected a divergence", o.kl_target);
  require(o.has_critic() || (o.critic_warmup == 0 && o.length_alpha == 0 && o.critic_lambda < 0), kOptions,
          "'critic_warmup' is {}, 'length_alpha' is {} and 'critic_lambda' is {}, and advantage '{}' has no critic; expected 0, 0 and a "
          "negative number, or advantage gae",
          o.critic_warmup, o.length_alpha, o.critic_lambda, o.advantage);
  require(o.length_least_lambda == 0 || o.length_alpha > 0, kOptions, "'length_least_lambda' is {}, and 'length_alpha' is 0",
          o.length_least_lambda);
  const bool by_kinds = o.advantage == "gdpo";
  require(by_kinds || o.gdpo_weights.empty(), kOptions, "'gdpo_weights' are given, and the advantage is '{}'; expected gdpo", o.advantage);
  require(!by_kinds || (o.flawed_penalty == 0 && o.overlong_buffer == 0), kOptions,
          "advantage 'gdpo' compares kinds of scores, and 'flawed_penalty' ({}) and 'overlong_buffer' ({}) change their sum; expected 0 of "
          "both; hint: a verifier that scores these as kinds",
          o.flawed_penalty, o.overlong_buffer);
}

inline void check_loss(const Options& o) {
  const auto& kind = loss_kinds().at(o.loss);
  require(!kind.by_sequences || o.aggregation == "sequence_mean_token_mean", kOptions,
          "loss '{}' is a mean over sequences, and 'aggregation' is '{}'; expected sequence_mean_token_mean", o.loss, o.aggregation);
  require(!kind.of_whole || o.microbatch_tokens == 0, kOptions,
          "loss '{}' chooses tokens of a whole minibatch, and 'microbatch_tokens' is {}; expected 0", o.loss, o.microbatch_tokens);
  require(o.loss != "dro" || o.dro_beta > 0, kOptions, "'dro_beta' is {}; expected a positive number", o.dro_beta);
  require(o.cov_share > 0 && o.cov_share <= 1, kOptions, "'cov_share' is {}; expected a number above 0, up to 1", o.cov_share);
  require(o.clip_cov_least < o.clip_cov_most, kOptions, "'clip_cov_least' is {} and 'clip_cov_most' is {}; expected less", o.clip_cov_least,
          o.clip_cov_most);
}

}  // namespace detail

inline void check_options(const Options& o) {
  detail::check_names(o);
  detail::check_numbers(o);
  detail::check_advantage(o);
  detail::check_loss(o);
  require(o.save_every == 0 || !o.save.empty(), detail::kOptions, "'save_every' is {}, and 'save' names no folder", o.save_every);
  require(!o.resume || !o.save.empty(), detail::kOptions, "'resume' is true, and 'save' names no folder");
}

inline Options read_options(const nlohmann::json& given) {
  require(given.is_object(), detail::kOptions, "got {}; expected an object of options", given.dump());
  Options options;
  const auto algorithm = given.value("algorithm", nlohmann::json(options.algorithm));
  require(algorithm.is_string(), detail::kOptions, "'algorithm' is {}; expected a text", algorithm.dump());
  detail::check_name("algorithm", algorithm, detail::names_of(algorithms()));
  detail::take_options(options, algorithms().at(algorithm));
  detail::take_options(options, given);
  check_options(options);
  return options;
}

inline nlohmann::json to_json(const Options& options) {
  nlohmann::json all;
  for_each_option(options, [&](const char* name, const auto& field, const char*) { all[name] = field; });
  return all;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
