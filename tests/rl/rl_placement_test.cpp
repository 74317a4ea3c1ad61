// One PPO program with four roles, placed in several ways: what it learns is what one process learns.
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/advantages.hpp>
#include <dtensor/rl/entropy.hpp>
#include <dtensor/rl/groups.hpp>
#include <dtensor/rl/kl.hpp>
#include <dtensor/rl/losses.hpp>
#include <dtensor/rl/value_loss.hpp>
#include <dtensor/rng/random.hpp>

using namespace dtensor;
using namespace dtensor::test;
using rl::Batch;
using rl::WorkerGroup;

namespace {

constexpr int64_t kPlacedPrompts = 5, kPlacedTime = 3, kPlacedDigits = 4;

// A row of numbers for each prompt, cut along its last dim by tp.
struct PlacedTable : torch::nn::Module {
  explicit PlacedTable(std::vector<int64_t> sizes, int seed) {
    table = register_parameter("table", torch::zeros(sizes, torch::kDouble));
    const torch::NoGradGuard no_grad;
    table.copy_(rl_numbers(sizes, seed));
  }
  at::Tensor forward(const at::Tensor& prompts) { return table.index_select(0, prompts); }
  at::Tensor table;
};

struct PlacedRole {
  std::shared_ptr<PlacedTable> model;
  WorkerGroup group;
  PlacedRole(const std::string& name, const DeviceMesh& mesh, const std::vector<int64_t>& sizes, int seed)
      : group(name, mesh, [&] { return model = std::make_shared<PlacedTable>(sizes, seed); }) {
    group.set_optimizer(std::make_shared<torch::optim::Adam>(group.module().parameters(), torch::optim::AdamOptions(0.1)));
  }
};

struct Placement4 {
  DeviceMesh actor, critic, reference, judge;
};

// Answers drawn from the policy: the same on any ranks.
at::Tensor placed_answers(const at::Tensor& probabilities, uint64_t step) {
  const NoSpmd plain;
  const auto sums = probabilities.cumsum(-1);
  auto tokens = torch::zeros({probabilities.size(0), kPlacedTime}, torch::kLong);
  for (int64_t b = 0; b < tokens.size(0); ++b) {
    for (int64_t t = 0; t < kPlacedTime; ++t) {
      const auto below = sums[b][t].le(rng::uniform_at(3, step, b * kPlacedTime + t)).sum().item<int64_t>();
      tokens[b][t] = std::min(below, kPlacedDigits - 1);
    }
  }
  return tokens;
}

struct PlacedResults {
  std::vector<double> scores;
  at::Tensor actor, critic;
};

// A rank scores its own rows.
Batch placed_scores(const Batch& mine) {
  const NoSpmd plain;
  const auto rows = mine.own_rows();
  const auto tokens = DTensor(mine.get("tokens")).to_local();
  auto scores = torch::zeros({rows.length()}, torch::kDouble);
  for (auto row = rows.begin; row < rows.end; ++row) {
    const auto wanted = mine.objects("wanted")[row].get<int64_t>();
    scores[row - rows.begin] = tokens[row - rows.begin].eq(wanted).sum().item<double>() / kPlacedTime;
  }
  return {{"scores", scores}};
}

// Of one rollout: rewards with a penalty, advantages, returns.
Batch placed_advantages(const Batch& mine) {
  const auto mask = mine.get("mask");
  const auto kl = rl::kl_estimate(mine.get("old_logp"), mine.get("ref_logp"), rl::Kl::k1);
  const auto rewards = rl::rewards_with_kl(rl::at_last_token(mine.get("scores"), mask), kl, mask, 0.05);
  const auto [advantages, returns] = rl::gae(rewards, mine.get("old_values"), mask, {.lambda = 0.9});
  return {{"advantages", advantages}, {"returns", returns}};
}

PlacedResults placed_ppo(const Placement4& on_ranks_of, int64_t parts) {
  PlacedRole actor("actor", on_ranks_of.actor, {kPlacedPrompts, kPlacedTime, kPlacedDigits}, 1),
      critic("critic", on_ranks_of.critic, {kPlacedPrompts, kPlacedTime}, 2),
      reference("reference", on_ranks_of.reference, {kPlacedPrompts, kPlacedTime, kPlacedDigits}, 1);
  WorkerGroup judge("judge", on_ranks_of.judge);
  auto scoring = rl::all_to_all();
  scoring.own_results = true;
  const auto logp = [](PlacedRole& role, const Batch& mine) {
    return rl::token_statistics(role.model->forward(mine.get("prompts")), mine.get("tokens")).logp;
  };
  PlacedResults results;
  rl::Objects wanted;
  for (int64_t i = 0; i < kPlacedPrompts; ++i) wanted.emplace_back(i % kPlacedDigits);
  for (uint64_t step = 0; step < 3; ++step) {
    auto batch = Batch{{"prompts", torch::arange(kPlacedPrompts)}, {"wanted", wanted}}.repeat(3);
    batch.set("mask", torch::ones({batch.size(), kPlacedTime}, torch::kBool));
    batch.merge(actor.group.run({.name = "generate", .gives = {"tokens"}}, batch.select({"prompts"}), [&](const Batch& mine) {
      const torch::NoGradGuard no_grad;
      return Batch{{"tokens", placed_answers(full_tensor(actor.model->forward(mine.get("prompts")).softmax(-1)), step)}};
    }));
    batch.merge(judge.run({.name = "score", .gives = {"scores"}, .mode = scoring}, batch.select({"tokens", "wanted"}), placed_scores));
    for (auto* role : {&actor, &reference}) {
      const auto name = role == &actor ? "old_logp" : "ref_logp";
      batch.merge(role->group.run({.name = "log_prob", .gives = {name}}, batch.select({"prompts", "tokens"}), [&](const Batch& mine) {
        return Batch{{name, logp(*role, mine)}};
      }));
    }
    batch.merge(critic.group.run({.name = "values", .gives = {"old_values"}}, batch.select({"prompts"}), [&](const Batch& mine) {
      return Batch{{"old_values", critic.model->forward(mine.get("prompts"))}};
    }));
    batch.merge(actor.group.run({.name = "advantages", .gives = {"advantages", "returns"}},
                                batch.select({"scores", "old_logp", "ref_logp", "old_values", "mask"}), placed_advantages));
    const rl::Normalization by{{batch.size() * kPlacedTime, batch.size()}};
    const auto update = [&](PlacedRole& role, const Batch& given, const std::function<at::Tensor(const Batch&)>& loss) {
      role.group.run({.name = "update"}, given, [&](const Batch& mine) {
        for (int epoch = 0; epoch < 2; ++epoch) {
          role.group.optimizer()->zero_grad();
          for (const auto& part : mine.microbatches(parts)) loss(part).backward();
          role.group.optimizer()->step();
        }
      });
    };
    update(critic, batch.select({"prompts", "old_values", "returns", "mask"}), [&](const Batch& part) {
      return rl::value_loss(critic.model->forward(part.get("prompts")), part.get("old_values"), part.get("returns"), part.get("mask"), by)
          .loss;
    });
    update(actor, batch.select({"prompts", "tokens", "old_logp", "advantages", "mask"}), [&](const Batch& part) {
      return rl::ppo_loss({logp(actor, part), part.get("old_logp"), part.get("advantages"), part.get("mask")}, by).loss;
    });
    const auto everyone = init_device_mesh(c10::kCPU, {World::current().size()}, {"all"});
    results.scores.push_back(full_tensor(batch.get("scores", everyone)).sum().item<double>());
  }
  const auto whole = [&](const at::Tensor& x) {
    const auto everyone = init_device_mesh(c10::kCPU, {World::current().size()}, {"all"});
    return full_tensor(redistribute(x.detach(), everyone, {replicate()}));
  };
  results.actor = whole(actor.model->table);
  results.critic = whole(critic.model->table);
  return results;
}

}  // namespace

TEST_CASE("rl placement: one program learns the same wherever its roles are", "[rl]") {
  PlacedResults expected;
  on_ranks(1, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {1}, {"dp"});
    expected = placed_ppo({mesh, mesh, mesh, mesh}, 1);
  });
  CHECK((expected.actor - rl_numbers({kPlacedPrompts, kPlacedTime, kPlacedDigits}, 1)).abs().max().item<double>() > 0.1);
  const auto line = [](std::vector<int> ranks) {
    const auto count = static_cast<int64_t>(ranks.size());
    return DeviceMesh(c10::kCPU, std::move(ranks), {count}, {"dp"});
  };
  const std::vector<std::pair<std::string, std::function<Placement4()>>> placements{
      {"all on all ranks",
       [&] {
         const auto all = line({0, 1, 2, 3});
         return Placement4{all, all, all, all};
       }},
      {"each on its own",
       [&] {
         return Placement4{line({0}), line({1}), line({2}), line({3})};
       }},
      {"some together",
       [&] {
         return Placement4{line({0, 1}), line({1, 2, 3}), line({2}), line({3, 0, 1})};
       }},
      {"in two dimensions",
       [&] {
         const DeviceMesh square(c10::kCPU, {0, 1, 2, 3}, {2, 2}, {"dp", "tp"});
         return Placement4{square, line({3, 2}), square, line({1})};
       }},
  };
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const auto& [name, placement] : placements) {
      for (const int64_t parts : {1, 2}) {
        if (transport != "threads" && parts == 2) continue;
        CAPTURE(transport, name, parts);
        REQUIRE_NOTHROW(on_ranks(
            4,
            [&, &placement = placement, parts = parts](World&) {
              const auto got = placed_ppo(placement(), parts);
              for (size_t i = 0; i < got.scores.size(); ++i) rl_near(got.scores[i], expected.scores[i], "scores");
              rl_near(got.actor.reshape({kPlacedPrompts, -1}), rl_rows(expected.actor.reshape({kPlacedPrompts, -1})), "the actor");
              rl_near(got.critic, rl_rows(expected.critic), "the critic");
            },
            transport));
      }
    }
  }
}
