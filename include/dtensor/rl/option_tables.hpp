// The names that options of a Trainer may have, and what they stand for.
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct AdvantageKind {
  bool of_groups = false;     // compares the answers to a prompt
  bool of_rewards = false;    // of the rewards of tokens, which the divergence may be a part of; else of scores of answers
  bool of_densities = false;  // takes the old policy's log-probabilities and sums of squared probabilities
};
const std::map<std::string, AdvantageKind>& advantage_kinds();

struct LossKind {
  bool by_sequences = false;  // a mean over sequences, whatever the aggregation
  bool of_whole = false;      // chooses among the tokens of a whole minibatch
};
const std::map<std::string, LossKind>& loss_kinds();

// Each stands for values of options that are not given otherwise.
const std::map<std::string, nlohmann::json>& algorithms();

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

using Names = std::vector<std::string>;
inline const Names kAggregations{"token_mean", "token_sum", "sequence_mean_token_mean", "sequence_mean_token_sum"};
inline const Names kKls{"none", "k1", "magnitude", "k2", "k3", "k1_through", "k3_through"};
inline const Names kDppoDivergences{"total_variation", "binary_kl"};

template <class T>
Names names_of(const std::map<std::string, T>& map) {
  Names names;
  for (const auto& [name, value] : map) names.push_back(name);
  return names;
}

}  // namespace detail

inline const std::map<std::string, AdvantageKind>& advantage_kinds() {
  static const std::map<std::string, AdvantageKind> all{
      {"gae", {.of_rewards = true}},
      {"grpo", {.of_groups = true}},
      {"drgrpo", {.of_groups = true}},
      {"grpo_pass_at_k", {.of_groups = true}},
      {"gdpo", {.of_groups = true}},
      {"rloo", {.of_groups = true}},
      {"opo", {.of_groups = true}},
      {"remax", {.of_rewards = true}},
      {"reinforce_plus_plus", {.of_rewards = true}},
      {"reinforce_plus_plus_baseline", {.of_groups = true}},
      {"gpg", {.of_groups = true}},
      {"optimal_token_baseline", {.of_groups = true, .of_rewards = true, .of_densities = true}},
  };
  return all;
}

inline const std::map<std::string, LossKind>& loss_kinds() {
  static const std::map<std::string, LossKind> all{
      {"ppo", {}},
      {"gspo", {.by_sequences = true}},
      {"cispo", {}},
      {"sapo", {.by_sequences = true}},
      {"gmpo", {.by_sequences = true}},
      {"gpg", {}},
      {"dro", {}},
      {"dppo", {}},
      {"clip_cov", {.of_whole = true}},
      {"kl_cov", {.of_whole = true}},
  };
  return all;
}

inline const std::map<std::string, nlohmann::json>& algorithms() {
  using nlohmann::json;
  static const std::map<std::string, json> all{
      {"ppo", {{"advantage", "gae"}, {"samples", 1}, {"prompts", 256}, {"kl", "k1"}, {"kl_in", "reward"}}},
      {"grpo", json::object()},
      {"drgrpo", {{"advantage", "drgrpo"}, {"aggregation", "sequence_mean_token_sum"}}},
      {"rloo", {{"advantage", "rloo"}}},
      {"opo", {{"advantage", "opo"}}},
      {"reinforce++", {{"advantage", "reinforce_plus_plus"}, {"kl", "k1"}, {"kl_in", "reward"}}},
      {"gpg", {{"advantage", "gpg"}, {"loss", "gpg"}}},
      {"gspo", {{"loss", "gspo"}, {"aggregation", "sequence_mean_token_mean"}, {"clip_low", 3e-4}, {"clip_high", 4e-4}}},
      {"cispo", {{"loss", "cispo"}, {"clip_low", 1}}},
      {"sapo", {{"loss", "sapo"}, {"aggregation", "sequence_mean_token_mean"}}},
      {"gmpo", {{"loss", "gmpo"}, {"aggregation", "sequence_mean_token_mean"}, {"clip_low", 0.4}, {"clip_high", 0.4}}},
      {"dro", {{"loss", "dro"}}},
      {"dppo", {{"loss", "dppo"}}},
      {"clip_cov", {{"loss", "clip_cov"}}},
      {"kl_cov", {{"loss", "kl_cov"}}},
      {"grpo_pass_at_k", {{"advantage", "grpo_pass_at_k"}}},
      {"gdpo", {{"advantage", "gdpo"}}},
      {"otb", {{"advantage", "optimal_token_baseline"}}},
      {"remax", {{"advantage", "remax"}, {"samples", 1}, {"prompts", 256}}},
      {"reinforce++_baseline", {{"advantage", "reinforce_plus_plus_baseline"}}},
      {"dapo", {{"clip_high", 0.28}, {"dynamic_sampling", true}}},
      {"fapo", {{"clip_high", 0.28}, {"dynamic_sampling", true}, {"flawed_penalty", 1}}},
      {"vapo",
       {{"advantage", "gae"},
        {"clip_high", 0.28},
        {"critic_lambda", 1},
        {"length_alpha", 0.05},
        {"length_least_lambda", 0.95},
        {"nll_weight", 0.1},
        {"critic_warmup", 50}}},
  };
  return all;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
