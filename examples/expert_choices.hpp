// What a command line says about a model's layers of experts.
#pragma once

#include <CLI/CLI.hpp>
#include <dtensor/nn/expert_load.hpp>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>

struct ExpertChoices {
  std::string dispatch = "alltoall", balance = "loss", rows = "exact";
  int64_t tiles = 1;
  double capacity = 0;
  std::string map;  // a file for a picture of the last step
};

inline void add_expert_options(CLI::App& app, ExpertChoices& o) {
  app.add_option("--dispatch", o.dispatch, "with a mesh dimension ep: how tokens come to experts")
      ->check(CLI::IsMember({"alltoall", "deduplicated", "allgather", "automatic"}));
  app.add_option("--rows", o.rows, "with ep: what rows are while they travel, there and back")
      ->check(CLI::IsMember({"exact", "bfloat16", "blocks8"}));
  app.add_option("--tiles", o.tiles, "with ep: in so many parts, of which one is computed while others travel")->check(CLI::Range(1, 1024));
  app.add_option("--balance", o.balance, "what keeps experts equally busy: a loss, a bias without a loss, or nothing")
      ->check(CLI::IsMember({"loss", "bias", "none"}));
  app.add_option("--capacity", o.capacity, "how many times its equal share an expert takes; 0: all tokens that come")
      ->check(CLI::NonNegativeNumber);
}

// unused(option, is used, why) throws where an option was given and has no use.
template <class Unused>
void check_expert_use(const std::string& model, bool ep, bool pp, const Unused& unused) {
  const std::array families{"mixtral", "qwen3", "deepseek"};
  const bool mixture = std::ranges::any_of(families, [&](const char* family) { return model.starts_with(family); });
  for (const auto* option : {"--dispatch", "--rows", "--tiles"})
    unused(option, ep, "no mesh has a dimension ep: add one, as in --mesh dp=2,ep=2");
  unused("--expert-map", !pp, "a rank of pp has some of the layers only");
  for (const auto* option : {"--balance", "--capacity", "--expert-map"}) unused(option, mixture, model + " has no experts");
  if (ep && !mixture) throw CLI::ValidationError("--mesh", "ep cuts experts, and " + model + " has none");
}

inline bool has_experts(torch::nn::Module& model) {
  bool found = false;
  dtensor::nn::for_each_moe(model, [&](auto&) { found = true; });
  return found;
}

// How experts are balanced, and what they take.
inline void set_experts(torch::nn::Module& model, const ExpertChoices& o, double loss_scale) {
  dtensor::nn::for_each_moe(model, [&](dtensor::nn::MoEImpl& layer) {
    layer.loss_scale = loss_scale;
    layer.options.capacity_factor = o.capacity;
    if (o.balance != "loss") layer.options.balance_loss = 0;
    if (o.balance == "bias") layer.balance_by_bias(0.001);
    if (o.balance == "none") layer.options.bias_rate = 0;
  });
}

// Experts over ep, and the width of each over tp.
inline void cut_experts(torch::nn::Module& model, const dtensor::DeviceMesh& mesh, const ExpertChoices& o) {
  const auto& names = mesh.names();
  const bool cuts_experts = std::ranges::count(names, "ep") > 0;
  dtensor::ExpertParallelOptions options{.dims = {}, .hidden = std::ranges::count(names, "tp") > 0 ? "tp" : "", .dispatch = o.dispatch};
  options.rows = options.results = o.rows, options.tiles = o.tiles;
  if (cuts_experts) options.dims = {"ep"};
  if (has_experts(model) || cuts_experts) dtensor::expert_parallel(model, mesh, options);
}

// Of the layers that this rank has: the tokens of the busiest expert over the mean, the largest of all layers.
inline double most_over_mean(const std::vector<dtensor::nn::ExpertLoad>& loads) {
  double most = 0;
  for (const auto& load : loads) most = std::max(most, load.max_over_mean);
  return most;
}

inline void draw_experts(const ExpertChoices& o, const std::vector<dtensor::nn::ExpertLoad>& loads) {
  if (!o.map.empty()) std::ofstream(o.map) << dtensor::nn::expert_map(loads);
}
