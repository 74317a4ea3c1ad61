// Advantages, losses and divergences that options name: what roles make of a batch is what the functions give on whole plain tensors.
#include "tests/support/generate_support.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/judge.hpp>
#include <dtensor/rl/roles.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kAnswers = 8, kTime = 7;  // of ids
const std::vector<int64_t> kLengths{7, 5, 6, 7, 4, 7, 5, 6};

// Answers of a token at least, behind a prompt of two.
at::Tensor answer_mask() {
  auto mask = torch::zeros({kAnswers, kTime - 1}, torch::kBool);
  for (int64_t b = 0; b < kAnswers; ++b) mask.narrow(0, b, 1).narrow(1, 1, kLengths[b] - 2).fill_(true);
  return mask;
}

// What a rollout, a judge and the passes before an update leave, the same on every rank.
std::map<std::string, at::Tensor> answers() {
  const NoSpmd plain;
  const auto some = [](int seed) { return rl_numbers({kAnswers, kTime - 1}, seed); };
  const auto mask = answer_mask();
  return {{"ids", rl_numbers({kAnswers, kTime}, 1, 0, kVocabulary).to(torch::kLong)},
          {"mask", mask},
          {"rollout_logp", some(2).sub(2).masked_fill(mask.logical_not(), 0)},
          {"groups", torch::arange(kAnswers).div(4, "floor")},
          {"scores", rl_numbers({kAnswers}, 3, 0, 1)},
          {"parts", rl_numbers({kAnswers, 2}, 4, 0, 1)},
          {"greedy_scores", rl_numbers({kAnswers}, 5, 0, 1)},
          {"right", rl_numbers({kAnswers}, 6).gt(0)},
          {"flawed", rl_numbers({kAnswers}, 7).gt(0)},
          {"values", some(8)},
          {"advantages", some(9)}};
}

rl::Batch batch_of(const std::map<std::string, at::Tensor>& columns) {
  rl::Batch batch;
  for (const auto& [name, x] : columns) batch.set(name, x);
  batch.meta()["lengths"] = kLengths;
  return batch;
}

rl::Options step_options(nlohmann::json given) {
  given.update({{"prompts", 2}, {"samples", 4}, {"epochs", 1}, {"lr", 0.003}, {"grad_clip", 1e9}});
  return rl::read_options(given);
}

rl::TokenStatistics statistics_of(SmallText& model, const std::map<std::string, at::Tensor>& a) {
  const auto ids = a.at("ids");
  return rl::token_statistics(model.forward(ids.narrow(1, 0, kTime - 1)), ids.narrow(1, 1, kTime - 1), {.sum_squares = true});
}

// By their functions.
at::Tensor advantages_by_hand(const std::string& name, const std::map<std::string, at::Tensor>& a) {
  const auto scores = a.at("scores"), groups = a.at("groups"), mask = a.at("mask"), rewards = rl::at_last_token(scores, mask);
  if (name == "gae") return rl::gae(rewards, a.at("values"), mask, {.lambda = 0.9}).advantages;
  if (name == "grpo") return rl::grpo(scores, groups, mask);
  if (name == "drgrpo") return rl::grpo(scores, groups, mask, {.by_std = false});
  if (name == "grpo_pass_at_k") return rl::grpo_pass_at_k(scores, groups, mask);
  if (name == "gdpo") return rl::gdpo(a.at("parts"), groups, mask, {1, 0.5});
  if (name == "rloo") return rl::rloo(scores, groups, mask);
  if (name == "opo") return rl::opo(scores, groups, mask);
  if (name == "remax") return rl::remax(rewards, a.at("greedy_scores"), mask).advantages;
  if (name == "reinforce_plus_plus") return rl::reinforce_plus_plus(rewards, mask).advantages;
  if (name == "reinforce_plus_plus_baseline") return rl::reinforce_plus_plus_baseline(scores, groups, mask);
  if (name == "gpg") return rl::gpg(scores, groups, mask);
  if (name != "optimal_token_baseline") return {};
  SmallText model;
  const torch::NoGradGuard no_grad;
  const auto found = statistics_of(model, a);
  const auto weights = rl::importance_weights(found.logp, a.at("rollout_logp"), mask, {.upper = 2});
  return rl::optimal_token_baseline(rewards, found.logp, found.sum_squares, groups, mask, weights).advantages;
}

rl::PolicyLoss loss_by_hand(const std::string& name, const rl::PolicyTerms& t, const rl::Normalization& by) {
  if (name == "ppo") return rl::ppo_loss(t, by, {.clip_low = 0.1, .clip_high = 0.15, .dual_clip = 3});
  if (name == "gspo") return rl::gspo_loss(t, by, {.clip_low = 0.1, .clip_high = 0.15});
  if (name == "cispo") return rl::cispo_loss(t, by, {.clip_low = 0.1, .clip_high = 0.15});
  if (name == "sapo") return rl::sapo_loss(t, by, {.tau_positive = 2, .tau_negative = 3});
  if (name == "gmpo") return rl::gmpo_loss(t, by, {.clip_low = 0.1, .clip_high = 0.15});
  if (name == "gpg") return rl::gpg_loss(t, by);
  if (name == "dro") return rl::dro_loss(t, by, 0.3);
  if (name == "dppo")
    return rl::dppo_loss(t, by, {.divergence = rl::DppoOptions::Divergence::binary_kl, .low = 0.1, .high = 0.15, .max_ratio = 1.2});
  if (name == "clip_cov") {
    rl::ClipCovOptions options{.clip_low = 0.1, .clip_high = 0.15, .share = 0.1};
    options.least = 0.05, options.most = 9, options.seed = rl::request_seed(0, 2, 0);
    return rl::clip_cov_loss(t, by, options);
  }
  return rl::kl_cov_loss(t, by, {.share = 0.1, .kl = 2});
}

const nlohmann::json kOfLosses{{"clip_low", 0.1},        {"clip_high", 0.15},      {"sapo_tau", 2},
                               {"sapo_tau_negative", 3}, {"dro_beta", 0.3},        {"dppo_max_ratio", 1.2},
                               {"cov_share", 0.1},       {"clip_cov_least", 0.05}, {"dppo_divergence", "binary_kl"},
                               {"clip_cov_most", 9},     {"kl_cov_weight", 2}};

// A step of an actor on this rank's world beside one by hand: the loss, the divergence, the gradient's norm, the parameters.
void require_step(const rl::Options& o) {
  auto a = answers();
  SmallText model;
  const auto by_hand = [&] {
    const NoSpmd plain;
    const torch::NoGradGuard no_grad;
    a["old_logp"] = statistics_of(model, a).logp + rl_numbers({kAnswers, kTime - 1}, 11, -0.3, 0.3);
    a["ref_logp"] = a["old_logp"] + rl_numbers({kAnswers, kTime - 1}, 12, -0.5, 0.5);
  };
  by_hand();
  rl::Actor<SmallText> actor(o, init_device_mesh(c10::kCPU, {World::current().size()}, {"dp"}),
                             [] { return std::make_shared<SmallText>(); });
  const auto got = actor.update(batch_of(a), o, 2);

  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(o.lr).betas({0.9, 0.95}).weight_decay(o.weight_decay));
  const auto mask = a.at("mask");
  const auto by = rl::normalization_by(o, rl::count(mask));
  const auto logp = statistics_of(model, a).logp;
  const auto policy = loss_by_hand(o.loss, {.logp = logp, .old_logp = a["old_logp"], .advantages = a["advantages"], .mask = mask}, by);
  auto total = policy.loss;
  if (o.has_reference()) {
    const auto kl = rl::aggregate(rl::kl_estimate(logp, a["ref_logp"], rl::kl_by(o)), mask, by);
    total = total + kl * o.kl_beta;
    rl_near(got.at("kl_loss").get<double>(), rl_item(kl), "the divergence", 1e-9);
  }
  total.backward();
  rl_near(got.at("pg_loss").get<double>(), rl_item(policy.loss), "the loss", 1e-9);
  rl_near(got.at("pg_clipfrac").get<double>(), rl_item(policy.metrics.clip_fraction), "what is clipped", 1e-9);
  double squares = 0;
  for (const auto& p : model.parameters()) squares += rl_item(p.grad().square().sum());
  require(squares > 0, "test", "the gradient is 0");
  rl_near(got.at("grad_norm").get<double>(), std::sqrt(squares), "the gradient's norm", 1e-9);
  optimizer.step();
  const auto updated = actor.model().parameters(), expected = model.parameters();
  for (size_t i = 0; i < expected.size(); ++i)
    rl_near(updated[i].reshape({1, -1}), rl_rows(expected[i].reshape({1, -1})), fmt::format("parameter {}", i), 1e-9);
}

void on_one_and_two(const std::function<void()>& body) {
  CHECK_NOTHROW(on_ranks(1, [&](World&) { body(); }));
  for (const std::string transport : {"threads", "gloo"})
    CHECK_NOTHROW(on_ranks(
        2, [&](World&) { body(); }, transport));
}

}  // namespace

TEST_CASE("rl algorithms: tables of names agree", "[rl]") {
  using rl::detail::names_of;
  CHECK(names_of(rl::detail::advantages_by_name()) == names_of(rl::advantage_kinds()));
  CHECK(names_of(rl::detail::losses_by_name()) == names_of(rl::loss_kinds()));
}

TEST_CASE("rl algorithms: every advantage is that of its function", "[rl]") {
  for (const auto& [name, kind] : rl::advantage_kinds()) {
    CAPTURE(name);
    nlohmann::json given{{"advantage", name}};
    if (name == "gae") given["lambda"] = 0.9;
    if (name == "gdpo") given["gdpo_weights"] = {1, 0.5};
    if (name == "optimal_token_baseline") given["correction"] = "token";
    const auto o = step_options(given);
    on_one_and_two([&, &name = name] {
      const auto a = answers();
      auto batch = batch_of(a);
      rl::Actor<SmallText> actor(o, init_device_mesh(c10::kCPU, {World::current().size()}, {"dp"}),
                                 [] { return std::make_shared<SmallText>(); });
      auto without = batch.pop({"advantages"});
      if (rl::advantage_kinds().at(name).of_densities) actor.log_prob(batch, o);
      actor.advantages(batch, o, 2);
      const auto expected = advantages_by_hand(name, a);
      rl_near(batch.get("advantages"), rl_rows(expected), name, 1e-9);
      require(rl_item(expected.abs().sum()) > 0, "test", "all are 0");
    });
  }
}

TEST_CASE("rl algorithms: a step by every loss is that of its function", "[rl]") {
  for (const auto& [name, kind] : rl::loss_kinds()) {
    CAPTURE(name);
    auto given = kOfLosses;
    given["loss"] = name;
    if (kind.by_sequences) given["aggregation"] = "sequence_mean_token_mean";
    const auto o = step_options(given);
    on_one_and_two([&] { require_step(o); });
  }
}

TEST_CASE("rl algorithms: a step with every divergence in the loss is that of its function", "[rl]") {
  for (const auto& form : rl::detail::kKls) {
    if (form == "none" || form == "k1") continue;  // without one, and refused
    CAPTURE(form);
    auto given = kOfLosses;
    given.update({{"kl", form}, {"kl_beta", 0.5}});
    const auto o = step_options(given);
    on_one_and_two([&] { require_step(o); });
  }
}

TEST_CASE("rl judge: scores kind by kind", "[rl]") {
  const rl::Verifier verifier = [](const std::string& text, const nlohmann::json&) {
    require(text != "throws", "test", "thrown");
    return rl::Verdict{.score = 1, .parts = std::vector<double>(text == "three" ? 3 : 2, static_cast<double>(text.size()))};
  };
  on_one_and_two([&] {
    rl::Judge judge(init_device_mesh(c10::kCPU, {World::current().size()}, {"dp"}), verifier, {}, 2);
    rl::Batch batch{{"texts", std::vector<std::string>{"a", "throws", "bcd"}}, {"truths", rl::Objects(3)}};
    judge.score(batch);
    rl_near(batch.get("parts"), {{1, 1}, {0, 0}, {3, 3}}, "parts");
    rl::Batch other{{"texts", std::vector<std::string>{"a", "three"}}, {"truths", rl::Objects(2)}};
    refuses("judge.score failed at step 1: ", [&] { judge.score(other); });
  });
}
