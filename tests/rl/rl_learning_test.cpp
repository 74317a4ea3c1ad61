// The loop of docs/rl.md: a table of logits learns to answer, by each family of losses, and ranks learn what one device learns.
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/advantages.hpp>
#include <dtensor/rl/entropy.hpp>
#include <dtensor/rl/losses.hpp>
#include <dtensor/rl/rewards/verifiers.hpp>
#include <dtensor/rng/random.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kPrompts = 4, kAnswers = 6, kLength = 2, kDigits = 5;

// The answer to prompt i is the text of these digits.
std::string right_answer(int64_t prompt) { return std::to_string(prompt) + std::to_string((prompt + 2) % kDigits); }

struct Rollout {
  at::Tensor tokens, scores;  // plain: [batch, time] and [batch]
};

// Draws from probabilities [batch, time, digits], and verifies.
Rollout rollout_of(const at::Tensor& probabilities, uint64_t step) {
  const NoSpmd plain;
  const auto batch = probabilities.size(0);
  const Rollout made{torch::zeros({batch, kLength}, torch::kLong), torch::zeros({batch}, torch::kDouble)};
  const auto sums = probabilities.cumsum(-1);
  for (int64_t b = 0; b < batch; ++b) {
    std::string text;
    for (int64_t t = 0; t < kLength; ++t) {
      const auto below = sums[b][t].le(rng::uniform_at(3, step, b * kLength + t)).sum().item<int64_t>();
      made.tokens[b][t] = std::min(below, kDigits - 1);
      text += std::to_string(std::min(below, kDigits - 1));
    }
    const auto right = right_answer(b / kAnswers);
    double digits = 0;
    for (int64_t t = 0; t < kLength; ++t) digits += text[t] == right[t] ? 1.0 / kLength : 0;
    made.scores[b] = 0.5 * digits + 0.5 * rl::exact_score(text, right);
  }
  return made;
}

using LossOf = std::function<rl::PolicyLoss(const rl::PolicyTerms&, const rl::Normalization&)>;

// The table after `steps` steps, two updates each. `shared` lays out what belongs to answers.
at::Tensor learned(const LossOf& loss_of, const RlShared& shared, int steps) {
  const auto table = torch::zeros({kPrompts, kLength, kDigits}, torch::kDouble).requires_grad_();
  torch::optim::Adam optimizer({table}, torch::optim::AdamOptions(0.1));
  const auto prompts = shared(torch::arange(kPrompts * kAnswers).div(kAnswers, "floor"));
  const auto mask = shared(torch::ones({kPrompts * kAnswers, kLength}, torch::kBool));
  for (int step = 0; step < steps; ++step) {
    const auto made = rollout_of(full_tensor(table.detach().index_select(0, prompts).softmax(-1)), step);
    const auto tokens = shared(made.tokens);
    const auto advantages = rl::grpo(shared(made.scores), prompts, mask);
    at::Tensor old_logp;
    for (int epoch = 0; epoch < 2; ++epoch) {
      const auto logp = rl::token_statistics(table.index_select(0, prompts), tokens).logp;
      if (epoch == 0) old_logp = logp.detach();
      optimizer.zero_grad();
      loss_of({logp, old_logp, advantages, mask}, {rl::count(mask)}).loss.backward();
      optimizer.step();
    }
  }
  return full_tensor(table.detach());
}

int64_t right_digits(const at::Tensor& table) {
  int64_t right = 0;
  for (int64_t i = 0; i < kPrompts; ++i) {
    for (int64_t t = 0; t < kLength; ++t) right += table[i][t].argmax().item<int64_t>() == right_answer(i)[t] - '0';
  }
  return right;
}

const std::vector<LossOf> kLosses{
    [](auto& x, auto& by) { return rl::ppo_loss(x, by, {.clip_low = 0.2, .clip_high = 0.28}); },
    [](auto& x, auto& by) { return rl::gspo_loss(x, by, {.clip_low = 0.1, .clip_high = 0.1}); },
    [](auto& x, auto& by) { return rl::cispo_loss(x, by); },
    [](auto& x, auto& by) { return rl::sapo_loss(x, by); },
    [](auto& x, auto& by) { return rl::gmpo_loss(x, by); },
    [](auto& x, auto& by) { return rl::gpg_loss(x, by); },
    [](auto& x, auto& by) { return rl::dro_loss(x, by, 0.1); },
    [](auto& x, auto& by) { return rl::dppo_loss(x, by); },
};

}  // namespace

TEST_CASE("rl learning: every loss teaches a table its answers", "[rl]") {
  const RlShared here = [](const at::Tensor& x) { return x; };
  CHECK(right_digits(torch::zeros({kPrompts, kLength, kDigits})) <= 3);
  for (const auto& loss : kLosses) CHECK(right_digits(learned(loss, here, 60)) == kPrompts * kLength);
}

TEST_CASE("rl learning: ranks learn what one device learns", "[rl]") {
  const auto expected = learned(
      kLosses[0], [](const at::Tensor& x) { return x; }, 5);
  CHECK_NOTHROW(rl_on_ranks([&](const RlShared& shared, const DeviceMesh& mesh) {
    if (mesh.ndim() == 1)
      rl_near(learned(kLosses[0], shared, 5).reshape({kPrompts, -1}), rl_rows(expected.reshape({kPrompts, -1})), "the table");
  }));
}
